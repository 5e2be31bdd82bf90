"""What waits for the message that explains it: who may have how much wait, and for how long."""

import pytest

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.member.held_step import Bundle
from hetpeer.averaging.member.member_life import Phase
from hetpeer.averaging.member.position import MAX_EARLY, NEAR, EarlyTensor, EarlyTensors, Origin
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.routes import Hop
from tests.averaging.rig import LINE, ME, STEP, begin, member_in, place

ROUTE = (Hop(ME, 0, 2),)
LATER = e.StepId(m.TermView(term=LINE.term + 1, view=0), STEP.number)
"""A step of a reign that is not here yet; or that somebody has made up."""


def runs(effects):
    return [x.effect.key.id for x in effects if isinstance(getattr(x, "effect", None), p.RunForward)]


def with_other():
    both = {"roster": {ME: (0, 2), "other": (0, 2)}, "incarnations": {ME: 7, "other": 1}}
    return begin().model_copy(update=both)


def flood(member, step, senders=("stranger",)):
    """As much as `senders` together can put there; what comes of it."""
    return [
        member.work.part(Origin(senders[i % len(senders)], 1, step, 1), 0, 0, f"flood {i}")
        for i in range(MAX_EARLY + 1)
    ]


@pytest.mark.parametrize("step", [LATER, e.StepId(LINE, 2**40), e.StepId(LINE, STEP.number + NEAR + 1)])
def test_a_stranger_has_nothing_wait_for_a_reign_or_a_step_that_cannot_be_near(step):
    member = member_in(Phase.READY)
    assert flood(member, step)[0] == [p.Release("flood 0")]
    assert member.work.activation(Origin("other", 1, STEP), Bundle(5, ROUTE, 0), "early") == []
    assert 5 in runs(member.receive(with_other()))


@pytest.mark.parametrize("number", [STEP.number, STEP.number + 1])
@pytest.mark.parametrize("strangers", [1, 60])
def test_strangers_that_fill_the_room_cost_nobody_else_its_own(number, strangers):
    """Before the first step nobody is known: who has the most gives way."""
    member = member_in(Phase.READY)
    flood(member, e.StepId(LINE, number), [f"stranger {i}" for i in range(strangers)])
    (release,) = member.work.activation(Origin("other", 1, STEP), Bundle(5, ROUTE, 0), "early")
    assert release.handle.startswith("flood")
    assert 5 in runs(member.receive(with_other()))


def test_who_works_with_us_comes_before_any_number_of_strangers():
    member = member_in(Phase.READY)
    member.receive(with_other())
    other = [Origin("other", 1, STEP, 1), Origin("other", 1, e.StepId(LINE, STEP.number + 1))]
    for i in range(MAX_EARLY // 2):
        assert member.work.part(other[0], 0, i, f"part {i}") == []
    flood(member, e.StepId(LINE, STEP.number + 1), [f"stranger {i}" for i in range(100)])
    for i in range(MAX_EARLY // 2):
        (release,) = member.work.gradient(other[1], i, 1, f"gradient {i}")
        assert release.handle.startswith("flood")
    assert member.work.part(Origin("stranger", 1, STEP, 1), 0, 0, "no room") == [p.Release("no room")]


def test_who_has_worked_with_us_is_believed_that_there_is_another_reign():
    member = member_in(Phase.READY)
    member.receive(with_other())
    member.receive(m.Welcome(line=LINE, version=STEP.number, member=False, places=(place(),)))
    assert member.work.activation(Origin("other", 1, LATER), Bundle(5, ROUTE, 0), "early") == []
    assert member.work.activation(Origin("stranger", 1, LATER), Bundle(5, ROUTE, 0), "x") == [p.Release("x")]


def test_the_newest_goes_of_whoever_has_the_most_and_the_others_keep_their_order():
    held = EarlyTensors()
    for i in range(MAX_EARLY - 2):
        assert held.hold(waiting("greedy", i)) is None
    assert held.hold(waiting("modest", "a")) is None
    assert held.hold(waiting("modest", "b")) is None
    assert held.hold(waiting("modest", "c")).handle == MAX_EARLY - 3
    assert held.hold(waiting("greedy", "more")).handle == "more"
    held.forget(STEP)
    assert [one.handle for one in held.take()] == ["a", "b", "c"]
    assert held.hold(waiting("greedy", 0)) is None


def waiting(sender, handle):
    step = STEP if sender == "greedy" else LATER
    return EarlyTensor(Origin(sender, 1, step), lambda _step: [], handle, partner=False)
