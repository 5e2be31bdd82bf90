"""Random schedules of the group scheduler, with stragglers, arrivals and departures.

A failing seed is replayed by `python -m tests.simulation.group_schedules --seed N`.
"""

import pytest

from hetpeer.averaging.groups.group_scheduler import Group, WaitQueue
from tests.amounts import mostly_proof
from tests.simulation.group_schedules import GroupWatch, schedule

SEEDS = range(500)


@pytest.mark.parametrize("count", mostly_proof([100, len(SEEDS)], [100]))
def test_nobody_hangs_and_any_span_of_groups_connects_everybody(count):
    outcomes = [schedule(seed) for seed in SEEDS[:count]]
    for outcome in outcomes:
        assert outcome.violation is None, outcome
        assert outcome.apart == 0, outcome
    assert sum(outcome.came for outcome in outcomes) > count
    assert sum(outcome.went for outcome in outcomes) > count
    assert sum(outcome.groups for outcome in outcomes) > 50 * count


@pytest.mark.parametrize("rules", ["paper", "artifact"])
def test_sdpipes_rules_do_not_hang_but_leave_somebody_apart(rules):
    outcomes = [schedule(seed, rules) for seed in range(60)]
    assert [outcome for outcome in outcomes if outcome.violation] == []
    assert any(outcome.apart for outcome in outcomes)


def test_a_schedule_is_its_seed():
    assert schedule(7) == schedule(7) != schedule(8)


# ── the watch sees what it is there for ─────────────────────────────────────────────────────────────────────


def test_the_watch_sees_who_is_apart():
    watch = GroupWatch(1, 1, ["a", "b", "c"])
    for number, members in enumerate((("a", "b"), ("b", "c"), ("a", "b"), ("a", "b"), ("a", "b")), 1):
        watch.formed(Group(0, number, members))
        assert watch.apart == (1 if number == 5 else 0)
    watch.left("a")
    with pytest.raises(AssertionError, match="somebody who is gone"):
        watch.formed(Group(0, 6, ("a",)))


def test_a_scheduler_that_checks_nothing_or_waits_for_too_many_is_found_out(monkeypatch):
    monkeypatch.setattr(WaitQueue, "valid", property(lambda _line: True))
    assert any(schedule(seed).apart for seed in range(20))
    monkeypatch.setattr(WaitQueue, "valid", property(lambda line: len(line._ready) > 1))
    assert any("nothing is under way" in (schedule(seed).violation or "") for seed in range(20))
