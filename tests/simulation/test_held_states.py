"""Volunteers that alter the state of their blocks, and say so first, or give another one for checkpoints, in
the simulator (docs/trust.md, "Agreement on states").

That the run ends in the state of one machine is looked at in each history.
"""

import dataclasses
import re
from collections import defaultdict

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.peer.simulate.sim_hooks import ViolationError
from tests.amounts import mostly_proof
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import LAYOUTS
from tests.simulation.lying_swarms import BLOCKS, PAIRS, STEPS, lying, said

SEVERAL = {
    "one stage": HistoryConfig(volunteers=4, layouts=LAYOUTS[0], checkpoint_every=3),
    "two stages": HistoryConfig(volunteers=8, layouts=LAYOUTS[1], checkpoint_every=3),
}


@pytest.mark.parametrize("seed", mostly_proof(range(3), [0]))
@pytest.mark.parametrize(
    ("shape", "lie"), [("one stage", "alters"), ("two stages", "alters"), ("one stage", "saves")]
)
def test_one_of_several_is_found_out_and_nobody_else_is_blamed(lie, shape, seed):
    swarm, liar = lying(SEVERAL[shape], lie, seed)
    assert {record["peer"] for record in said(swarm, "gone")} == {liar}
    assert {record["peer"] for record in said(swarm, "banned")} <= {liar}
    assert not said(swarm, "rollback")


@pytest.mark.parametrize("seed", mostly_proof(range(3), [0]))
@pytest.mark.parametrize("shape", PAIRS)
def test_one_of_two_whose_memory_errs_once_costs_the_steps_since_the_checkpoint(shape, seed):
    swarm, _ = lying(PAIRS[shape], "flips", seed, checkpoint_every=3)
    assert len(said(swarm, "rollback")) == 1
    assert not said(swarm, "banned"), "nobody knows which of the two"


@pytest.mark.parametrize("shape", PAIRS)
def test_who_gives_another_state_than_it_has_said_contradicts_itself(shape):
    swarm, _ = lying(PAIRS[shape], "saves", checkpoint_every=3)
    assert not said(swarm, "rollback")


@pytest.mark.parametrize("shape", PAIRS)
def test_one_of_two_that_lies_for_ever_does_not_hold_the_run_up_for_ever(shape):
    """Nobody can see its work while it is alone (docs/trust.md): only that is allowed."""
    config = dataclasses.replace(
        PAIRS[shape], lies={f"v{PAIRS[shape].volunteers - 1}": "alters"}, steps=STEPS
    )
    swarm = CheckedSwarm(0, config, CheckedSymbols(BLOCKS), Coverage())
    try:
        swarm.run(900.0)
    except ViolationError as error:
        assert "ended in another state than that of one machine" in str(error)
    assert {record["step"] for record in said(swarm, "commit")} == set(range(STEPS))


@pytest.mark.parametrize("lie", ["alters", "saves", "flips"])
@pytest.mark.parametrize("seed", mostly_proof(range(4), [1]))
def test_with_steps_that_overlap_and_faults_besides(lie, seed, monkeypatch):
    """Where the faults leave nobody but the liar to make a version, nobody can see what it does with it
    (docs/trust.md): only that is allowed.

    Of a version that is made once more after a roll-back that is asked anew: the first time it may have had
    company.
    """
    config, made = SEVERAL["two stages"], defaultdict(set)
    liar = f"v{config.volunteers - 1}"
    receive = Coordinator.receive

    def heard(self, peer, message, now):
        if isinstance(message, m.Applied):
            for held in message.held:
                made[held.block, held.version, message.line].add(peer)
        return receive(self, peer, message, now)

    monkeypatch.setattr(Coordinator, "receive", heard)
    try:
        swarm, _ = lying(config, lie, seed, faults=4, staleness=seed % 3)
    except ViolationError as error:
        (block,) = re.findall(r"block (\d+) ended in another state than that of one machine", str(error))
        assert {liar} in [by for (of, _, _), by in made.items() if of == int(block)]
    else:
        assert {record["peer"] for record in said(swarm, "banned")} <= {liar}
