"""Every cell of both state machines is reached or known to be impossible: no transition is there that nobody has seen."""

from itertools import product

from hetpeer.averaging.member import Phase
from hetpeer.bootstrap.coordinator import State
from hetpeer.peer.simulate.coverage import COORDINATOR_EVENTS, MEMBER_MESSAGES, Coverage
from hetpeer.peer.simulate.run import simulate
from tests.simulation.cells import (
    IMPOSSIBLE_COORDINATOR,
    IMPOSSIBLE_MEMBER,
    STEERED_COORDINATOR,
    STEERED_MEMBER,
)

SEEDS = range(1000, 1120)


def test_every_cell_of_both_machines():
    reached = Coverage()
    for seed in SEEDS:
        outcome = simulate(seed, reached, faults=20)
        assert outcome.violation is None, outcome
        assert outcome.faults >= 16, outcome
    assert reached.unreached_coordinator() - STEERED_COORDINATOR == IMPOSSIBLE_COORDINATOR.keys()
    assert reached.unreached_member() - STEERED_MEMBER == IMPOSSIBLE_MEMBER.keys()


def test_the_lists_name_cells_that_exist():
    coordinator = set(product((state.value for state in State), COORDINATOR_EVENTS))
    member = set(product((phase.value for phase in Phase), MEMBER_MESSAGES))
    assert IMPOSSIBLE_COORDINATOR.keys() | STEERED_COORDINATOR <= coordinator
    assert IMPOSSIBLE_MEMBER.keys() | STEERED_MEMBER <= member
    assert not IMPOSSIBLE_MEMBER.keys() & STEERED_MEMBER
    assert not IMPOSSIBLE_COORDINATOR.keys() & STEERED_COORDINATOR
