"""Microbatches that holders report as failed: who else is asked, and when nobody is left."""

import pytest

from hetpeer.bootstrap.coordinator.step_failures import MAX_FAILURES, StepFailures
from hetpeer.bootstrap.coordinator.step_ledger import StepLedger

WHY = "non-finite"


def failures(**roster):
    """Failures of step 5, with one microbatch over two blocks."""
    return StepFailures(5, 7, roster, 2, StepLedger((0,), (), 2))


def fail(known, *peers):
    """Whether anybody else can try after the last of these reports."""
    return [known.add(0, peer, peer, WHY) for peer in peers][-1]


def test_a_lone_holder_is_asked_three_times():
    known = failures(a=(0, 2))
    assert fail(known, *["a"] * (MAX_FAILURES - 1))
    assert not fail(known, "a")
    assert not known.hears(0, "a")
    failed = known.take()
    assert (failed.batch, failed.step, failed.id, failed.times) == (7, 5, 0, MAX_FAILURES)
    assert (failed.blocks, failed.holders) == ((0, 1), ("a",))
    assert known.take() is None


@pytest.mark.parametrize(("reports", "left"), [("ab", True), ("aab", True), ("abab", False)])
def test_two_holders_fail_as_often_each(reports, left):
    assert fail(failures(a=(0, 2), b=(0, 2)), *reports) is left


def test_only_the_blocks_that_nobody_computes_are_named():
    known = failures(a=(0, 1), b=(0, 1), c=(1, 2))
    assert not fail(known, "c", "c", "c")
    failed = known.take()
    assert (failed.blocks, failed.holders) == ((1,), ("c",))


def test_blame_of_another_is_no_failure_of_either():
    known = failures(a=(0, 1), b=(1, 2))
    assert all(known.add(0, "b", "a", WHY) for _ in range(MAX_FAILURES))
    assert known.who_else(0) == {"a": (0, 1), "b": (1, 2)}, "there is no way around the one that is blamed"


def test_an_id_goes_around_those_that_failed_it():
    known = failures(a=(0, 2), b=(0, 2), c=(0, 2))
    fail(known, "a")
    assert known.who_else(0).keys() == {"b", "c"}
    fail(known, "b", "c", "b")
    assert known.who_else(0).keys() == {"a", "c"}, "these failed it only once"


def test_whoever_comes_back_may_try_again():
    known = failures(a=(0, 2))
    fail(known, *["a"] * MAX_FAILURES)
    known.forget(["a"])
    assert known.hears(0, "a")
    assert fail(known, "a")


def test_a_trial_is_begun_once_and_then_the_holders_word_counts():
    known = failures(a=(0, 2))
    fail(known, *["a"] * MAX_FAILURES)
    failed = known.take()
    assert not known.awaits_trial(0)
    assert [known.begins_trial(failed), known.begins_trial(failed)] == [True, False]
    assert known.awaits_trial(0)
    known.tried(0)
    assert not known.awaits_trial(0)
    assert known.take() == failed


def test_no_trial_is_awaited_of_what_is_done():
    ledger = StepLedger((0,), (), 1)
    known = StepFailures(5, 7, {"a": (0, 1)}, 1, ledger)
    fail(known, *["a"] * MAX_FAILURES)
    known.begins_trial(known.take())
    ledger.skip(0)
    assert not known.awaits_trial(0)
