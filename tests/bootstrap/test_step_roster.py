"""The volunteers of a step, and what they are told in its name."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.step_roster import StepRoster, StepTerms

LINE = m.TermView(term=2, view=1)


@pytest.fixture
def roster():
    """Two volunteers with a block each."""
    terms = StepTerms(
        line=LINE,
        number=5,
        batch=7,
        microbatches=2,
        behind=1,
        mean=None,
        blocks=2,
        targets={"a": 0.5, "c": 2.0},
        weights=(3.0, 4.0),
    )
    return StepRoster(terms, {"a": (0, 1), "b": (1, 2)}, {"a": 10, "b": 11, "elsewhere": 12})


def begun(roster, **tasks):
    return {effect.to: effect.message for effect in roster.begin(tasks)}


def test_everybody_is_told_the_roster_and_its_own_tasks(roster):
    task = m.Task(id=0, route=(("a", 0, 1), ("b", 1, 2)))
    told = begun(roster, a=(task,))
    assert told.keys() == {"a", "b"}
    assert {one.roster["b"] for one in told.values()} == {(1, 2)}
    assert told["a"].incarnations == {"a": 10, "b": 11}
    assert (told["a"].tasks, told["b"].tasks) == ((task,), ())
    assert (told["a"].step, told["a"].batch, told["a"].behind, told["a"].entry) == (5, 7, 1, 0)


def test_weights_are_for_the_last_block_and_the_longest_target_for_who_has_none(roster):
    told = begun(roster)
    assert (told["a"].weights, told["b"].weights) == ((), (3.0, 4.0))
    assert (told["a"].target, told["b"].target) == (0.5, 2.0)


def test_entries_are_numbered_and_know_the_roster_as_it_is(roster):
    roster.leave(["b"])
    first, second = roster.enter("b", 21, (1, 2)), roster.enter("late", 1, (0, 1))
    assert [effect.message.entry for effect in (first, second)] == [1, 2]
    assert first.message.roster == {"a": (0, 1), "b": (1, 2)}
    assert second.message.incarnations == {"a": 10, "b": 21, "late": 1}


def test_late_joiners_are_announced_once_to_all_that_are_here(roster):
    assert roster.make_known() == []
    roster.enter("late", 1, (0, 1))
    told = roster.make_known()
    assert [effect.to for effect in told] == ["a", "b", "late"]
    assert told[0].message.entrants == (m.Entrant(peer="late", incarnation=1, begin=0, end=1),)
    assert roster.make_known() == []


def test_whoever_left_is_not_announced(roster):
    roster.enter("late", 1, (0, 1))
    assert roster.leave(["late", "stranger"]) == ["late"]
    assert roster.make_known() == []
    assert roster.places.keys() == {"a", "b"}


def test_orders_name_the_step(roster):
    (again,) = roster.hand_out({"a": ()})
    orders = [again, *roster.urge(), roster.settle("b", 3, (1,)), roster.evict("b", [0, 1])]
    assert [order.to for order in orders] == ["a", "a", "b", "b", "b"]
    assert {(order.message.line, order.message.step) for order in orders} == {(LINE, 5)}
    assert (orders[-2].message.slot, orders[-2].message.refused) == (3, (1,))
    assert orders[-1].message.blocks == (0, 1)
