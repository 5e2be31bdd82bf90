"""Each life cycle is set in one module, and its table has a row for every state."""

import ast
from pathlib import Path

import pytest

from hetpeer.bootstrap.coordinator.machine import Event, Machine
from hetpeer.bootstrap.state.effects import CoordinatorState
from hetpeer.bootstrap.state.volunteer_state import LifeCycle, VolunteerState

BOOTSTRAP = Path(__file__).parents[2] / "hetpeer" / "bootstrap"
OWNERS = {
    "life_cycle": {"state/volunteer_state.py"},
    "line": {"coordinator/machine.py"},
    "state": {"coordinator/machine.py", "grouped/cluster_events.py"},
}
"""Attribute → the modules that may set it; the state of a grouped run as a whole is that of
cluster_events.py.
"""
NO_TRANSITION = {"line": {"coordinator/step.py"}}
"""A step notes the term and view in which it began."""


def assigned(source, attribute):
    """Lines of `source` that assign to an attribute of this name."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Store)
    ]


@pytest.mark.parametrize("attribute", OWNERS)
def test_only_the_state_machine_sets_a_state(attribute):
    setting = {
        str(path.relative_to(BOOTSTRAP))
        for room in ("coordinator", "grouped", "state", "trust", "conduct", "service")
        for path in (BOOTSTRAP / room).glob("*.py")
        if assigned(path.read_text(), attribute)
    }
    assert setting - NO_TRANSITION.get(attribute, set()) == OWNERS[attribute]


def test_an_assignment_among_others_is_found():
    assert assigned("one.place, one.life_cycle = place, 1", "life_cycle") == [1]
    assert not assigned("found = one.life_cycle", "life_cycle")


def test_every_event_has_an_answer_in_every_state():
    assert set(Machine.TABLE) == set(Event)
    assert all(set(row) == set(CoordinatorState) for row in Machine.TABLE.values())


def test_nothing_happens_to_a_finished_run():
    answers = {row[CoordinatorState.FINISHED] for row in Machine.TABLE.values()}
    assert {answer.__name__ for answer in answers} == {"_nothing"}


@pytest.mark.parametrize("state", LifeCycle)
def test_a_new_version_leaves_nobody_who_missed_it_at_work(state):
    one = VolunteerState("a", 1, 0.0, life_cycle=state)
    one.outdate()
    joining = state is LifeCycle.JOINING
    assert one.life_cycle is (LifeCycle.JOINING if joining else LifeCycle.PREPARED)
    assert one.missed == (state in (LifeCycle.SYNCING, LifeCycle.READY))
