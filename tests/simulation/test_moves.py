"""Volunteers are moved at random while the run goes on: each move is judged once, if it can be."""

import pytest

from hetpeer.bootstrap.log.history import History
from tests.amounts import mostly_proof
from tests.simulation.arrangements import Arrangements
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.faults import Faults
from tests.simulation.histories import LAYOUTS
from tests.simulation.lying_swarms import BLOCKS, said


def played(seed: int, *, faults: int, staleness: int = 0) -> CheckedSwarm:
    config = HistoryConfig(
        volunteers=4, layouts=LAYOUTS[2], steps=60, checkpoint_every=10, staleness=staleness
    )
    swarm = CheckedSwarm(seed, config, CheckedSymbols(BLOCKS), Coverage())
    if faults:
        Faults(swarm, faults)
    Arrangements(swarm, seed, 40.0)
    swarm.run(3000.0)
    return swarm


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("seed", mostly_proof(range(6), range(1)))
def test_what_came_of_a_move_is_measured(seed: int, staleness: int) -> None:
    """Nobody comes or goes: each is judged, unless the next one came too soon or the run was over."""
    swarm = played(seed, faults=0, staleness=staleness)
    results = [record for record in said(swarm, "moved") if not record["why"]]
    assert results
    assert all(record["after_s"] > 0.0 < record["moving_s"] for record in results)


@pytest.mark.parametrize("seed", mostly_proof(range(12), range(2)))
def test_a_move_is_not_judged_by_another_swarm(seed: int) -> None:
    """Volunteers and coordinators die: the log says why nothing was compared."""
    swarm = played(seed, faults=12)
    settled = [move for move in History.of(swarm.log).moves if move.result is not None]
    assert all(move.result.why or move.kept is not None for move in settled)
