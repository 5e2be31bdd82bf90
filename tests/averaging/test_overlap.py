"""Steps that overlap, at a member driven by hand (docs/asynchronous.md)."""

import pytest

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import InStep
from hetpeer.averaging.member.member_life import Phase
from hetpeer.averaging.member.position import Origin
from hetpeer.stages.pipeline import effects as p
from tests.averaging.rig import LINE, STEP, begin, commit, member_in, welcome

NEXT = STEP._replace(number=STEP.number + 1, behind=1)
AFTER = STEP._replace(number=STEP.number + 2, behind=1)


def beside(step, behind=1):
    return begin(step).model_copy(update={"behind": behind})


def inside(effects, kind):
    """Step and effect, of those of one kind."""
    return [(x.step, x.effect) for x in effects if isinstance(x, InStep) and isinstance(x.effect, kind)]


def overlapping(phase=Phase.REDUCING):
    """A member whose next step is under way as well."""
    member = member_in(phase)
    member.receive(beside(NEXT.number))
    return member


def test_the_next_step_is_begun_beside_the_one_in_progress():
    member = member_in(Phase.TRAINING)
    effects = member.receive(beside(NEXT.number))
    assert not [x for x in effects if isinstance(x, e.EndStep)]
    assert member.work.ids == [STEP, NEXT]
    assert (member.work.step, member.phase, NEXT.base) == (STEP, Phase.TRAINING, STEP.number)


def test_older_versions_stay_as_long_as_a_step_is_computed_with_them():
    member = overlapping()
    effects = member.receive(commit())
    assert [effect.needed for _, effect in inside(effects, e.ApplyUpdate)] == [STEP.number] * 2
    alone = member_in(Phase.REDUCING)
    effects = alone.receive(commit())
    assert [effect.needed for _, effect in inside(effects, e.ApplyUpdate)] == [STEP.number + 1] * 2


def test_work_goes_on_while_an_update_is_applied_and_words_wait():
    """Begin of the one after is of the version that is about to be."""
    member = overlapping()
    member.receive(commit())
    assert member.phase is Phase.APPLYING
    assert member.receive(beside(AFTER.number)) == []
    key = p.TaskKey(0, 0)
    effects = member.work.forward_done(NEXT, key, None, 0.5)
    assert inside(effects, p.RunBackward)
    assert member.applied(STEP, 0, "after 0") == []
    effects = member.applied(STEP, 1, "after 1")
    assert [x.step for x in effects if isinstance(x, e.EndStep)] == [STEP]
    assert member.work.ids == [NEXT, AFTER]
    assert (member.version, member.phase) == (STEP.number + 1, Phase.TRAINING)


def test_leavers_leave_all_steps_and_what_they_still_say_is_released():
    member = overlapping(Phase.TRAINING)
    late = m.Entrant(peer="late", incarnation=4, begin=0, end=1)
    member.receive(m.Joined(line=LINE, step=STEP.number, entrants=(late,)))
    member.receive(m.Joined(line=LINE, step=NEXT.number, entrants=(late,)))
    member.receive(m.Gone(line=LINE, peers=("late",)))
    for step in (STEP, NEXT):
        effects = member.work.gradient(Origin("late", 3, step.on_wire), 0, 1, "tensor")
        assert effects == [p.Release("tensor")]


def test_tensors_and_words_are_of_their_step():
    member = overlapping(Phase.TRAINING)
    key = p.TaskKey(0, 0)
    member.work.forward_done(STEP, key, None, 0.5)
    member.work.backward_done(STEP, key, None)
    member.work.forward_done(NEXT, key, None, 0.25)
    sealed = [x for x in member.work.backward_done(NEXT, key, None) if isinstance(x, e.Tell)]
    assert [(x.message.step, x.message.losses) for x in sealed] == [(NEXT.number, {0: 0.25})]
    member.receive(m.Settled(line=LINE, step=NEXT.number, slot=0))
    assert member.work.slots(NEXT).accepted() == 0
    assert member.work.slots(STEP).accepted() is None
    effects = member.receive(m.Evict(line=LINE, step=NEXT.number, blocks=(1,)))
    assert [step for step, _ in inside(effects, object)] == [NEXT]


@pytest.mark.parametrize(
    "message",
    [beside(AFTER.number), beside(NEXT.number, behind=2), beside(AFTER.number, behind=0)],
    ids=["one is missing between", "an older version", "a newer version"],
)
def test_a_step_that_does_not_follow_is_not_begun(message):
    """We have missed something: everything is dropped, and the coordinator says what to fetch."""
    member = member_in(Phase.TRAINING)
    effects = member.receive(message)
    assert [x.step for x in effects if isinstance(x, e.EndStep)] == [STEP]
    assert [x.message.kind for x in effects if isinstance(x, e.Tell)] == ["prepared"]
    assert member.work.ids == []


@pytest.mark.parametrize(
    "message",
    [
        m.RolledBack(line=m.TermView(term=2, view=2), version=STEP.number, why="lost"),
        m.Finished(why="over", completed=True),
        m.Granted(line=LINE, begin=0, end=1),
    ],
    ids=lambda message: message.kind,
)
def test_all_steps_are_given_up_together(message):
    member = overlapping(Phase.TRAINING)
    effects = member.receive(message)
    assert [x.step for x in effects if isinstance(x, e.EndStep)] == [STEP, NEXT]
    assert member.work.ids == []
    key = p.TaskKey(0, 0)
    assert member.work.forward_done(NEXT, key, "bundle", None) == [p.Release("bundle")]


def test_a_voter_that_missed_the_commit_applies_it_and_drops_the_rest():
    member = overlapping()
    member.connected()
    answer = welcome(version=STEP.number + 1, member=True, commit=commit())
    effects = member.receive(answer)
    assert len(inside(effects, e.ApplyUpdate)) == 2
    member.applied(STEP, 0, "after 0")
    effects = member.applied(STEP, 1, "after 1")
    assert [x.step for x in effects if isinstance(x, e.EndStep)] == [STEP, NEXT]
    assert [x.message.kind for x in effects if isinstance(x, e.Tell)] == ["applied", "ready"]
