"""What a move promised and what came of it, folded from the log, and what the next one has to promise."""

import pytest

from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.log.moves import (
    FORGIVEN,
    KEPT,
    MOST_COST,
    MOST_DEMAND,
    Move,
    MovePromise,
    MoveResult,
    cost_factor,
    decode,
    demand,
    encode,
    measured_step_s,
)
from hetpeer.dht.base.errors import ProtocolError

REIGN = {"kind": "reign", "term": 1}


def promise(before_s: float | None = 30.0, after_s: float = 20.0, costs: float = 1.0) -> MovePromise:
    return MovePromise(before_s=before_s, after_s=after_s, moving_s=10.0 * costs, costs=costs, blocks=4)


def move(after_s: float | None, step: int = 0, moving_s: float = 10.0, **promised: float) -> Move:
    why = "" if after_s is not None else "others took part"
    result = MoveResult(after_s=after_s, moving_s=moving_s, why=why)
    return Move(step=step, promise=promise(**promised), result=result)


def commit(step: int, seconds: float) -> dict[str, object]:
    return {"kind": "commit", "step": step, "seconds": seconds}


def arranged(**promised: float) -> dict[str, object]:
    return {"kind": "arranged", "layouts": [], "promise": promise(**promised).model_dump()}


@pytest.mark.parametrize(
    ("afters", "asked"),
    [
        ([], 1.0),
        ([20.0], 1.0),
        ([15.0], 1.0),
        ([25.0], 2.0),
        ([31.0], MOST_DEMAND),
        ([None], 1.0),
        ([31.0, 20.0], MOST_DEMAND**0.5),
        ([31.0, 20.0, 20.0], MOST_DEMAND**0.25),
        ([20.0, 25.0], 2.0),
        ([31.0, None], MOST_DEMAND),
    ],
)
def test_a_broken_promise_asks_more_of_the_next_one_and_a_kept_one_less(
    afters: list[float | None], asked: float
) -> None:
    """Promised were 20 s instead of 30."""
    assert demand([move(after_s) for after_s in afters], 0) == pytest.approx(asked)


def test_what_is_asked_is_dropped_with_time() -> None:
    """Otherwise one bad figure would stop all moves of a long run for ever."""
    missed = [move(31.0, step=50)]
    later = [demand(missed, 50 + steps) - 1.0 for steps in (0, FORGIVEN, 10 * FORGIVEN)]
    assert later == pytest.approx([3.0, 1.5, 3.0 / 1024])


def test_the_cost_of_moves_is_the_middle_of_those_measured_against_what_was_foreseen() -> None:
    assert cost_factor([]) == 1.0
    first = move(20.0, moving_s=40.0)
    assert cost_factor([first]) == 4.0
    right = move(20.0, moving_s=40.0, costs=4.0)
    assert cost_factor([first, right]) == 4.0
    assert cost_factor([first, right, move(20.0, moving_s=10.0, costs=4.0)]) == 4.0
    assert cost_factor([move(20.0, moving_s=1e6)]) == MOST_COST


def test_a_history_has_the_moves_and_their_results_and_ends_those_that_cannot_be_compared() -> None:
    records = [
        REIGN,
        commit(0, 30.0),
        arranged(),
        {"kind": "moved", "after_s": 24.0, "moving_s": 12.0, "why": ""},
    ]
    history = History.of(records)
    assert history.moves == [
        Move(step=1, promise=promise(), result=MoveResult(after_s=24.0, moving_s=12.0, why=""))
    ]
    assert history.moves[0].kept == pytest.approx(0.6)
    open_one = History.of([*records, arranged()])
    assert open_one.moves[-1].result is None
    taken_over = History.of([*records, arranged(), {"kind": "reign", "term": 2}])
    again = History.of([*records, arranged(), arranged()])
    for ended in (taken_over.moves[-1], again.moves[-2]):
        assert ended.result is not None
        assert (ended.kept, ended.result.after_s) == (None, None)
        assert ended.result.why
    assert demand(taken_over.moves, 1) == demand(history.moves, 1) > 1.0, "the next coordinator asks as much"


def test_an_arrangement_without_promise_is_no_move() -> None:
    assert History.of([REIGN, {"kind": "arranged", "layouts": []}]).moves == []


def test_a_step_is_measured_by_full_steps_alone() -> None:
    """The first is slow, and so is the one in which the swarm changed."""
    history = History.of([commit(step, s) for step, s in enumerate([90.0, 30.0, 80.0, 31.0, 33.0])])
    assert measured_step_s(history, 0) == pytest.approx(32.0)
    assert measured_step_s(history, 2) == pytest.approx(32.0)
    assert measured_step_s(history, 3) is None
    assert measured_step_s(History.of([]), 0) is None


def test_moves_are_served_and_nothing_else_is_taken_for_them() -> None:
    some = [move(25.0, step=step) for step in range(2 * KEPT)]
    assert decode(encode(some), "peer") == tuple(some[-KEPT:])
    assert decode(encode([]), "peer") == ()
    for wrong in (b"", b"\xc1", b"\x91\x01", b"\x91\x81\xa4step\xff"):
        with pytest.raises(ProtocolError):
            decode(wrong, "peer")


def test_a_move_that_promises_no_shorter_step_is_not_judged_by_one() -> None:
    """It was made for steadier holders."""
    result = MoveResult(after_s=30.0, moving_s=10.0)
    assert Move(step=0, promise=promise(20.0, 19.5), result=result).kept is None
    assert Move(step=0, promise=promise(20.0, 18.0), result=result).kept == pytest.approx(-5.0)
