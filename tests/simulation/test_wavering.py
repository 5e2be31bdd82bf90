"""Volunteers that say that they are ready, and take that back, again and again: what they cost those who
train, in the simulator with the real cores.
"""

from dataclasses import replace

import pytest

from tests.amounts import mostly_proof
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import LAYOUTS
from tests.simulation.lying_swarms import BLOCKS, said
from tests.simulation.test_failing import TWO_STAGES

GOODPUT = 0.9
"""Least share of the honest volunteers' throughput that is left beside one that wavers."""
HONEST = HistoryConfig(
    volunteers=6, layouts=LAYOUTS[1], steps=24, microbatches=24, evaluate_every=100, speeds=(1.0,)
)


def played(config, seed=0):
    """The swarm at the run's end."""
    swarm = CheckedSwarm(seed, config, CheckedSymbols(BLOCKS), Coverage())
    swarm.run(1000.0)
    assert len(said(swarm, "commit")) == config.steps
    return swarm


@pytest.mark.parametrize("staleness", [0, 1])
def test_who_wavers_costs_others_a_tenth_at_most(staleness):
    """It had stopped the run: whatever a step had come to was done again for it, twice a second."""
    honest = replace(HONEST, staleness=staleness)
    alone_s = played(honest).world.now
    swarm = played(replace(honest, volunteers=7, lies={"v6": "wavers"}))
    assert alone_s / swarm.world.now >= GOODPUT


@pytest.mark.parametrize("seed", mostly_proof(range(3), [0]))
def test_who_wavers_where_nobody_else_holds_its_blocks_is_replaced(seed):
    config = HistoryConfig(volunteers=3, layouts=LAYOUTS[1], steps=12, seats=TWO_STAGES)
    swarm = played(replace(config, lies={"v1": "wavers"}), seed)
    assert swarm.coordinator.members.volunteers["v2"].place == (2, 4), "it had the other blocks before"
