"""Every cell of both state machines is reached or known to be impossible: no transition is there that nobody has seen."""

from itertools import product

import pytest

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


@pytest.fixture(scope="module")
def coverage():
    reached = Coverage()
    for seed in SEEDS:
        outcome = simulate(seed, reached, faults=10)
        assert outcome.violation is None, outcome
        assert outcome.faults >= 8, outcome
    return reached


@pytest.mark.xdist_group("coverage")
def test_every_cell_of_the_coordinator(coverage):
    unreached = coverage.unreached_coordinator() - STEERED_COORDINATOR
    assert unreached == IMPOSSIBLE_COORDINATOR.keys()


@pytest.mark.xdist_group("coverage")
def test_every_cell_of_the_member(coverage):
    unreached = coverage.unreached_member() - STEERED_MEMBER
    assert unreached == IMPOSSIBLE_MEMBER.keys()


def test_the_lists_name_cells_that_exist():
    coordinator = set(product((state.value for state in State), COORDINATOR_EVENTS))
    member = set(product((phase.value for phase in Phase), MEMBER_MESSAGES))
    assert IMPOSSIBLE_COORDINATOR.keys() | STEERED_COORDINATOR <= coordinator
    assert IMPOSSIBLE_MEMBER.keys() | STEERED_MEMBER <= member
    assert not IMPOSSIBLE_MEMBER.keys() & STEERED_MEMBER
    assert not IMPOSSIBLE_COORDINATOR.keys() & STEERED_COORDINATOR
