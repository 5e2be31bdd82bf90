"""Verdicts on a step: of all reports the gravest one decides."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.step_verdicts import StepVerdict, StepVerdicts
from hetpeer.bootstrap.state.effects import BadSample, TryMicrobatch
from tests.bootstrap.court import Court, kinds

BAD = BadSample(where="block 1", why="the loss is not finite")


class Step:
    """The only step of a court, and the verdicts on it, without a machine that carries them out."""

    def __init__(self, **changes):
        self.court = Court(**changes).begin("a", "b")
        self.step = self.court.core.machine.steps.first
        self._verdicts = StepVerdicts(self.court.core._context, self.court.core.machine.policy)

    def fail(self, *peers):
        for peer in peers:
            message = m.Failed(line=self.court.line, step=0, id=0, why="non-finite")
            self.step.receive(peer, message, self.court.now)
        return self._verdicts.judge(self.step, self.court.now)

    def tried(self, bad=None):
        trial = TryMicrobatch(0, 0, 0)
        return self._verdicts.tried(self.step, trial, bad, self.court.now)


@pytest.fixture
def step():
    return Step()


def test_nothing_follows_from_a_step_that_goes_on(step):
    assert step.fail() == step.fail("a") == StepVerdict()


def test_a_microbatch_that_all_failed_is_tried_before_anything_follows(step):
    assert step.fail("a", "b", "a", "b") == StepVerdict(effects=(TryMicrobatch(0, 0, 0),), waits=True)
    assert step.fail("a") == StepVerdict(waits=True)


def test_holders_that_failed_what_can_be_computed_end_the_run_if_nobody_else_is_there(step):
    step.fail("a", "b", "a", "b")
    verdict = step.tried()
    assert verdict == StepVerdict(halt="microbatch 0 of step 0 failed 4 times: non-finite")


def test_a_lone_holder_makes_room_for_others():
    step = Step(layouts=(((0, 2),), ((0, 2),)))
    step.court.core.machine.departures.lose({"b": "gone"}, step.court.now)
    step.fail("a", "a", "a")
    verdict = step.tried()
    assert verdict.halt is None
    assert verdict.fenced == {"a": "microbatch 0 of step 0 failed 3 times: non-finite"}
    assert "a" in step.court.core._context.failures.resting


def test_a_bad_sample_ends_a_run_that_skips_none(step):
    step.fail("a", "b", "a", "b")
    verdict = step.tried(BAD)
    assert kinds(list(verdict.effects)) == ["bad_sample"]
    assert "microbatch 0" in verdict.halt


def test_a_bad_sample_is_left_out_and_the_step_goes_on():
    step = Step(skips=True)
    step.fail("a", "b", "a", "b")
    verdict = step.tried(BAD)
    record, *others = verdict.effects
    assert (record.record["kind"], record.record["skipped"]) == ("bad_sample", True)
    assert step.court.told("a", others) == step.court.told("b", others) == ["reroute"]
    assert verdict == StepVerdict(effects=verdict.effects)
    assert step.step.ledger.skipped == {0}


def test_nothing_is_left_of_a_step_whose_samples_are_all_bad():
    step = Step(skips=True, sizes=(1,))
    step.fail("a", "b", "a", "b")
    assert step.tried(BAD).halt == "no microbatch of step 0 can be computed"
