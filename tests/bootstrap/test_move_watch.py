"""A move is watched until it has settled: what it took and what came of it stand in the log."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.move_watch import COMPARED
from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.log.moves import MovePromise
from hetpeer.bootstrap.state.effects import CoordinatorState
from tests.bootstrap.court import Court

FRONT, BACK = (0, 1), (1, 2)
PROMISE = MovePromise(before_s=8.0, after_s=4.0, moving_s=5.0, blocks=2)
DIVIDED = Arrangement(((FRONT, BACK),), {"a": (0, FRONT), "b": (0, BACK)}, PROMISE)


def step(court: Court, seconds: float, *peers: str) -> None:
    """A step that takes so long, from its beginning to its commit."""
    for _ in range(round(seconds)):
        for peer in peers:
            court.tell(peer, m.Heartbeat())
        court.now += 1.0
    court.commit(*peers)


def moved(arrangement: Arrangement = DIVIDED) -> Court:
    """Two volunteers that are moved after a step of 8 s; storing takes 2 s, fetching 3."""
    court = Court(steps=40, checkpoint_every=100).begin("a", "b")
    court.do(court.core.arrange(arrangement, court.now))
    step(court, 8.0, "a", "b")
    court.now += 2.0
    court.save()
    for peer in ("a", "b"):
        court.tell(peer, m.Prepared())
    court.now += 3.0
    for peer in ("a", "b"):
        court.ready(peer)
    assert court.core.state is CoordinatorState.TRAINING
    return court


def results(court: Court) -> list[dict[str, object]]:
    return [record for record in court.records if record["kind"] == "moved"]


def test_cost_and_steps_of_a_move_are_measured_and_logged() -> None:
    """5 s from the last step to the next, which takes 4 s longer than those after it."""
    court = moved()
    assert [r["promise"] for r in court.records if r["kind"] == "arranged"] == [PROMISE.model_dump()]
    for seconds in (10.0, 6.0, 9.0):
        step(court, seconds, "a", "b")
        assert results(court) == []
    step(court, 5.0, "a", "b")
    (found,) = results(court)
    assert (found["after_s"], found["moving_s"], found["why"]) == (6.0, pytest.approx(9.0), "")
    step(court, 5.0, "a", "b")
    assert len(results(court)) == 1
    (move,) = History.of(court.records).moves
    assert (move.step, move.kept, move.costs) == (1, pytest.approx(0.5), pytest.approx(9.0 / 5.0))
    assert court.core.history.moves == [move]


def test_nothing_is_compared_if_others_take_part() -> None:
    court = moved()
    step(court, 4.0, "a", "b")
    court.prepare("c")
    court.ready("c")
    step(court, 4.0, "a", "b")
    if not results(court):
        court.ready("c")
        step(court, 4.0, "a", "b", "c")
    (found,) = results(court)
    assert (found["after_s"], found["moving_s"]) == (None, pytest.approx(5.0))
    assert "other volunteers" in str(found["why"])


def test_nothing_is_compared_if_the_run_goes_back() -> None:
    court = moved()
    step(court, 4.0, "a", "b")
    court.tell("b", m.Farewell())
    court.tick(1.0)
    (found,) = results(court)
    assert found["after_s"] is None
    assert "went back" in str(found["why"])
    (move,) = History.of(court.records).moves
    assert move.kept is None


def test_the_next_coordinator_does_not_judge_a_move_that_it_has_not_seen() -> None:
    court = moved()
    step(court, 4.0, "a", "b")
    again = Court(court.records, steps=40, checkpoint_every=100)
    assert again.core.history.moves[-1].result is not None
    assert again.core.history.moves[-1].kept is None
    assert results(again) == []


def test_a_move_without_promise_is_not_watched() -> None:
    court = moved(Arrangement(DIVIDED.layouts, DIVIDED.seats))
    for _ in range(COMPARED + 1):
        step(court, 4.0, "a", "b")
    assert results(court) == []
    assert History.of(court.records).moves == []
