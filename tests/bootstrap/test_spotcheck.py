"""What follows from two or three words on the same sums."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.spotcheck import Piece, SpotCheck, Verdict
from hetpeer.bootstrap.standing import Part

TRUE, FALSE, OTHER = b"true", b"false", b"other"
KEYS = {"r1": b"1", "r2": b"2"}
PIECE = Piece(0, 0, 1)


def distance(one, other):
    return 0.0 if one == other and one else 1.0


def mark(reducer, values=b""):
    return m.Mark(block=0, begin=0, end=5, key=KEYS[reducer], values=values)


def check(received, *opinions):
    """C is checked by "a", and "b": what the reducers have received of it, and what each opinion is."""
    one = SpotCheck(1, "c", "a")
    one.accepted([PIECE])
    if len(opinions) > 1:
        one.third("b")
    for opinion in one.opinions:
        assert opinion.next() == [PIECE]
        assert not one.computed
        assert one.done(opinion.peer, 0, 0)
    assert one.ask(3, [*received, "c"]) == list(received)
    asked = None
    for reducer, values in received.items():
        asked = one.received(reducer, (mark(reducer, values),) if values else ())
    assert asked == tuple(mark(reducer) for reducer, values in received.items() if values)
    for peer, values in zip("ab", opinions, strict=False):
        assert not one.complete
        one.shown(peer, [mark(reducer, values) for reducer in received])
    assert one.complete
    return one


@pytest.mark.parametrize(
    ("received", "opinions", "verdict", "culprit"),
    [
        ((TRUE, TRUE), (TRUE,), Verdict.PASSED, ""),
        ((FALSE, FALSE), (TRUE,), Verdict.OPEN, ""),
        ((FALSE, FALSE), (TRUE, TRUE), Verdict.CONVICTED, "c"),
        ((TRUE, TRUE), (FALSE, TRUE), Verdict.CONVICTED, "a"),
        ((FALSE, FALSE), (TRUE, OTHER), Verdict.DISPUTED, "a"),
        ((FALSE, TRUE), (TRUE,), Verdict.DISPUTED, "r1"),
        ((TRUE, b""), (TRUE,), Verdict.PASSED, ""),
        ((b"", b""), (TRUE,), Verdict.LAPSED, ""),
        ((FALSE, b""), (TRUE, TRUE), Verdict.DISPUTED, "a"),
        ((TRUE, TRUE), (b"", TRUE), Verdict.CONVICTED, "a"),
    ],
)
def test_two_of_three_decide_and_one_reducer_convicts_nobody(received, opinions, verdict, culprit):
    one = check(dict(zip(KEYS, received, strict=True)), *opinions)
    assert one.judge(0.5, distance) is verdict
    assert one.culprit == culprit


def test_a_checker_has_two_at_a_time_and_counts_what_it_was_asked():
    one = SpotCheck(1, "c", "a")
    one.accepted(Piece(number, 0, 1) for number in range(4))
    (opinion,) = one.opinions
    assert [piece.id for piece in opinion.next()] == [0, 1]
    assert opinion.next() == []
    assert not one.done("b", 0, 0), "nobody has asked it"
    assert not one.done("a", 3, 0), "not yet"
    assert one.done("a", 1, 0)
    assert not one.done("a", 1, 0), "once"
    assert [piece.id for piece in opinion.next()] == [2]


def test_it_knows_who_has_not_shown_anything():
    one = check({"r1": TRUE, "r2": TRUE}, TRUE)
    assert one.silent == set()
    one.void()
    one.ask(4, KEYS)
    one.received("r1", (mark("r1", TRUE),))
    assert one.silent == {("r2", Part.SHOWS)}
    one.received("r2", ())
    assert one.silent == {("a", Part.SHOWS)}
    assert one.took_part == {(peer, Part.SHOWS) for peer in KEYS}


def test_it_is_of_exactly_what_the_plan_adds():
    one = SpotCheck(1, "c", "a")
    one.accepted([Piece(0, 0, 2), Piece(1, 0, 1)])
    assert one.is_of({0: [("c", (0, 1)), ("d", (2,))], 1: [("c", (0,)), ("d", (1, 2))]})
    assert not one.is_of({0: [("c", (0,)), ("d", (1, 2))], 1: [("c", (0,)), ("d", (1, 2))]})


def test_another_plan_asks_for_everything_once_more():
    one = check({"r1": TRUE, "r2": TRUE}, TRUE)
    assert one.is_under(3)
    one.void()
    assert not one.complete
    assert not one.is_under(3)
    assert one.ask(4, ["r2"]) == ["r2"]
    assert not one.is_under(3), "a late answer convicts nobody"
    assert one.is_under(4)
