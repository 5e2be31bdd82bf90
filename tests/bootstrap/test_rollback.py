"""With which version a run goes on when it lacks a holder, and what it gives up for that."""

import pytest

from hetpeer.bootstrap.coordinator.rollback import Retreat, Rollback
from hetpeer.bootstrap.state.effects import CoordinatorState
from tests.bootstrap.court import Court, kinds, one_each, sole_holder, training


def rollback(court):
    machine = court.core.machine
    return Rollback(
        court.core._context,
        machine.policy,
        machine.barrier,
        machine.steps,
        machine.checkpoints,
        machine.move_watch,
    )


@pytest.fixture
def ahead():
    """Both volunteers hold version 1, and version 0 is stored."""
    court = training()
    court.commit("a", "b")
    assert (court.core.history.version, court.core.history.stored) == (1, False)
    return court


def test_a_version_that_somebody_holds_is_kept(ahead):
    retreat = rollback(ahead).without_holder("why")
    assert (retreat.version, retreat.awaited) == (1, frozenset())


def test_a_version_that_nobody_holds_is_given_up_for_the_checkpoint(ahead):
    ahead.core.members.volunteers.clear()
    assert rollback(ahead).without_holder("why") == Retreat("why", 0)


def test_a_version_is_kept_while_its_holder_may_come_back(ahead):
    ahead.core.members.volunteers.clear()
    ahead.core.machine.barrier.await_until(["a"], 200.0)
    assert rollback(ahead).without_holder("why") == Retreat("why", 1, frozenset("a"), 200.0)


def test_a_step_that_lacks_nobody_is_not_given_up():
    court = training()
    assert rollback(court).for_orphans(court.core.machine.steps.first, court.now) is None


def test_a_step_is_given_up_when_nobody_comes_and_another_could_be_moved():
    court = sole_holder("c")
    step = court.core.machine.steps.first
    court.core.machine.departures.lose({"b": "gone"}, court.now)
    decisions = rollback(court)
    assert step.orphaned == [1]
    assert decisions.for_orphans(step, court.now) is None
    later = court.now + court.core._context.config.move_s
    assert decisions.for_orphans(step, later) == Retreat("nobody comes for block 1", 0)


def test_all_that_is_under_way_is_given_up_and_everybody_told():
    court = one_each()
    effects = rollback(court).begin_anew(1, "why", [], court.now)
    assert not court.core.machine.steps
    assert kinds(effects) == ["rollback"]
    assert effects[0].record["to_version"] == 1
    assert [one["step"] for one in effects[0].record["given_up"]] == [2]
    assert {peer: court.told(peer, effects) for peer in "ab"} == {"a": ["rolled_back"], "b": ["rolled_back"]}


def test_the_machine_opens_a_new_view_before_the_record_is_written(ahead):
    view = ahead.line.view
    effects = ahead.do(ahead.core.machine.roll_back("why", ahead.now))
    assert effects[0].record["view"] == ahead.line.view == view + 1
    assert ahead.core.state is CoordinatorState.WAITING


def test_holders_of_the_version_that_is_kept_are_waited_for(ahead):
    ahead.do(ahead.core.machine.without_holder("why", ahead.now))
    assert ahead.core.state is CoordinatorState.SYNCING


def test_whoever_may_come_back_is_awaited_in_the_new_view():
    court = Court().begin("a")
    court.commit("a")
    court.core.machine.barrier.await_until(["a"], 200.0)
    court.do(court.core.machine.without_holder("why", court.now))
    assert court.core.machine.barrier.awaited == {"a"}
    assert court.core.machine.barrier.return_by == 200.0
