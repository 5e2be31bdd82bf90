"""How a check goes on: who computes, compares and shows what, and when all of it is known."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.reputation import CheckDuty, CheckRules
from hetpeer.bootstrap.trust.checker_reports import UNDER_WAY, Charge, CheckedPiece, CheckRoute
from hetpeer.bootstrap.trust.spot_check import SpotCheck
from hetpeer.bootstrap.trust.verdicts import CheckOutcome, CheckVerdict

TRUE, FALSE, OTHER = b"true", b"false", b"other"
KEYS = {"r1": b"1", "r2": b"2"}
PIECE = CheckedPiece(0, 0, 1)
LINE = m.TermView(term=1, view=0)
RULES = CheckRules(
    tolerance=0.5,
    draw=lambda: 0.0,
    key=bytes,
    distance=lambda one, other: 0.0 if one == other and one else 1.0,
)


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
    assert one.computed
    heard = ["c"] if len(opinions) > 1 else []
    assert one.ask(3, [*received, "c"]) == [*heard, *received]
    asked = None
    for reducer, values in received.items():
        asked = one.received(reducer, (mark(reducer, values),) if values else ())
    assert asked == tuple(mark(reducer) for reducer, values in received.items() if values)
    for peer, values in zip("ab", opinions, strict=False):
        assert not one.complete
        one.shown(peer, [mark(reducer, values) for reducer in received], ())
    for peer in heard:
        assert one.silent == {(peer, CheckDuty.EXPLAINS)}
        one.shown(peer, (), ())
    assert one.complete
    return one


def test_who_shows_several_fingerprints_of_a_block_shows_none():
    """Or so many that no checker could answer all of them in one message."""
    one = SpotCheck(1, "c", "a")
    one.accepted([PIECE])
    assert one.opinions[0].next() == [PIECE]
    assert one.done("a", 0, 0)
    assert one.ask(3, ["r1", "r2", "c"])
    assert one.received("r1", (mark("r1", TRUE), mark("r1", OTHER))) is None
    assert one.received("r2", (mark("r2", TRUE),)) == (mark("r2"),)


@pytest.mark.parametrize(
    ("received", "opinions", "verdict", "culprit"),
    [
        ((TRUE, TRUE), (TRUE,), CheckVerdict.PASSED, ""),
        ((FALSE, FALSE), (TRUE,), CheckVerdict.OPEN, ""),
        ((FALSE, FALSE), (TRUE, TRUE), CheckVerdict.CONVICTED, "c"),
        ((TRUE, TRUE), (FALSE, TRUE), CheckVerdict.CONVICTED, "a"),
        ((FALSE, FALSE), (TRUE, OTHER), CheckVerdict.DISPUTED, "a"),
        ((FALSE, TRUE), (TRUE,), CheckVerdict.DISPUTED, "r1"),
        ((TRUE, b""), (TRUE,), CheckVerdict.PASSED, ""),
        ((b"", b""), (TRUE,), CheckVerdict.LAPSED, ""),
        ((FALSE, b""), (TRUE, TRUE), CheckVerdict.DISPUTED, "a"),
        ((TRUE, TRUE), (b"", TRUE), CheckVerdict.CONVICTED, "a"),
    ],
)
def test_two_of_three_decide_on_sums_and_one_reducer_convicts_nobody(received, opinions, verdict, culprit):
    outcome = check(dict(zip(KEYS, received, strict=True)), *opinions).judge(RULES)
    assert outcome.verdict is verdict
    assert outcome.culprit == culprit
    assert not outcome.apart, "no bundle is in question"


def test_where_there_is_no_third_it_is_a_dispute():
    outcome = check({"r1": FALSE, "r2": FALSE}, TRUE).judge(RULES, alone=True)
    assert outcome == CheckOutcome(CheckVerdict.DISPUTED, "a", "c", witness="a")


def test_a_checker_has_two_at_a_time_and_counts_what_it_was_asked():
    one = SpotCheck(1, "c", "a")
    one.accepted(CheckedPiece(number, 0, 1) for number in range(4))
    (opinion,) = one.opinions
    assert [piece.id for piece in opinion.next()] == list(range(UNDER_WAY))
    assert opinion.next() == []
    assert not one.done("b", 0, 0), "nobody has asked it"
    assert not one.done("a", 3, 0), "not yet"
    assert one.done("a", 1, 0)
    assert not one.done("a", 1, 0), "once"
    assert [piece.id for piece in opinion.next()] == [2]


def word(peer, border, *, back, about="a", differ=(), alike=()):
    return m.Compared(
        line=LINE,
        step=0,
        check=1,
        id=0,
        border=border,
        back=back,
        peer=about,
        differ=differ,
        alike=alike,
    )


def test_a_piece_is_checked_when_those_have_spoken_who_have_got_something_of_it():
    one = SpotCheck(1, "c", "a")
    one.accepted([CheckedPiece(0, 2, 4)])
    (opinion,) = one.opinions
    (piece,) = opinion.next()
    assert one.goes(opinion, piece, CheckRoute("u", "a", "d"))
    assert not one.goes(opinion, piece, CheckRoute("u", "a", "d")), "that is told"
    assert opinion.awaited == {
        ("a", CheckDuty.CHECKS),
        ("u", CheckDuty.LENDS),
        ("u", CheckDuty.COMPARES),
        ("d", CheckDuty.ANSWERS),
        ("d", CheckDuty.COMPARES),
    }
    assert one.goes(opinion, piece, CheckRoute("u", "a", "e")), "somebody else has the gradient by now"
    assert not one.compared("d", word("d", 4, back=False, differ=("c",)))
    assert one.compared("e", word("e", 4, back=False, alike=("c",)))
    assert not one.compared("e", word("e", 4, back=False, differ=("c",))), "once"
    assert one.done("a", 0, 2)
    assert not one.computed
    assert opinion.awaited == {("a", CheckDuty.CHECKS), ("u", CheckDuty.COMPARES)}, "it may not have got it"
    assert not one.compared("u", word("u", 2, back=True, about="b")), "that is not of this checker"
    assert one.compared("u", word("u", 2, back=True, differ=("c", "x")))
    assert one.computed
    assert {one.suspect for one in opinion.accusations} == {"c", "x"}
    assert one.ask(3, ["r1"]) == ["c", "r1"], "who is accused says what it has computed from"
    assert one.ask(3, ["r1"], mute=True) == ["r1"], "or has no excuse"


def computed_beside(*neighbours):
    """C is checked by "a" in one microbatch for each of these, who have got what came of it and have said
    nothing yet.
    """
    one = SpotCheck(1, "c", "a")
    one.accepted(CheckedPiece(number, 0, 4) for number in range(len(neighbours)))
    (opinion,) = one.opinions
    for number, neighbour in enumerate(neighbours):
        opinion.next()
        assert one.goes(opinion, CheckedPiece(number, 0, 4), CheckRoute("a", "a", neighbour))
        assert one.done("a", number, 0)
    assert one.finished
    assert not one.computed
    return one


def said(number, peer, **about):
    return word(peer, 4, back=False, **about).model_copy(update={"id": number})


def test_who_is_mute_is_not_waited_for_and_may_speak_all_the_same():
    one = computed_beside("d", "e")
    (opinion,) = one.opinions
    assert one.compared("e", said(1, "e", alike=("c",)))
    one.spare("d".__eq__)
    assert one.computed
    assert not opinion.awaited
    assert one.answered == {
        ("a", CheckDuty.CHECKS),
        ("d", CheckDuty.ANSWERS),
        ("e", CheckDuty.ANSWERS),
        ("e", CheckDuty.COMPARES),
    }
    assert one.compared("d", said(0, "d", differ=("c",)))
    assert not one.compared("d", said(0, "d", alike=("c",))), "once"
    assert opinion.charge("c", back=False) == Charge(frozenset("d"), 2)
    assert ("d", CheckDuty.COMPARES) in one.answered


def test_silence_does_not_make_others_most_of_those_who_could_compare():
    one = computed_beside(*"defg")
    (opinion,) = one.opinions
    for number, peer in enumerate("de"):
        assert one.compared(peer, said(number, peer, differ=("c",)))
    charge = opinion.charge("c", back=False)
    assert charge == Charge(frozenset("de"), 4)
    assert not charge.may_be_true
    assert one.compared("f", said(2, "f", differ=("c",)))
    assert opinion.charge("c", back=False).may_be_true
    assert not {("a", CheckDuty.CHECKS), ("g", CheckDuty.COMPARES)} & one.answered, (
        "it may not have been sent to that one"
    )


def test_who_is_accused_after_sums_are_shown_is_heard_all_the_same():
    one = computed_beside("d")
    assert one.ask(3, KEYS) == list(KEYS)
    assert one.received("r1", (mark("r1", TRUE),)) is None
    assert one.compared("d", said(0, "d", differ=("c",)))
    assert not one.has_asked
    assert one.ask(3, KEYS) == ["c", *KEYS]


def test_nobody_is_asked_about_itself():
    one = SpotCheck(1, "c", "a")
    one.accepted([CheckedPiece(0, 2, 4)])
    (opinion,) = one.opinions
    (piece,) = opinion.next()
    one.goes(opinion, piece, CheckRoute("c", "a", "a"))
    assert one.done("a", 0, 2)
    assert one.computed


def test_it_knows_who_has_not_shown_anything():
    one = check({"r1": TRUE, "r2": TRUE}, TRUE)
    assert one.silent == set()
    one.void()
    one.ask(4, KEYS)
    one.received("r1", (mark("r1", TRUE),))
    assert one.silent == {("r2", CheckDuty.SHOWS)}
    one.received("r2", ())
    assert one.silent == {("a", CheckDuty.SHOWS)}
    assert one.took_part == {(peer, CheckDuty.SHOWS) for peer in KEYS}


def test_it_is_of_exactly_what_the_plan_adds():
    one = SpotCheck(1, "c", "a")
    one.accepted([CheckedPiece(0, 0, 2), CheckedPiece(1, 0, 1)])
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


# ── what rounding explains ──────────────────────────────────────────────────────────────────────────────────

FAR = CheckRules(
    tolerance=1e-3,
    draw=lambda: 0.0,
    key=bytes,
    distance=lambda one, other: 0.0 if one == other else 2.0,
    difference=lambda one, other: 0.0 if one == other else 8.0,
)


def measured(**lengths):
    return m.Checked(line=LINE, step=0, check=1, id=0, begin=0, **lengths)


def sums_that_differ(*said):
    """C's sums are false by 8.0 as all reducers see them; `said`: what each checker has measured."""
    one = SpotCheck(1, "c", "a")
    one.accepted([PIECE])
    if len(said) > 1:
        one.third("b")
    for opinion, lengths in zip(one.opinions, said, strict=True):
        assert opinion.next() == [PIECE]
        one.weighed("nobody", measured(sums=(1e6,)))
        one.weighed(opinion.peer, measured(**lengths))
        assert one.done(opinion.peer, 0, 0)
        one.weighed(opinion.peer, measured(sums=(1e6,)))  # of a piece that is done: nobody has asked
    one.ask(3, ["r1", "r2", "c"])
    for reducer in KEYS:
        one.received(reducer, (mark(reducer, FALSE),))
    for opinion in one.opinions:
        one.shown(opinion.peer, [mark(reducer, TRUE) for reducer in KEYS], ())
    one.shown("c", (), ())
    return one


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ([{}], CheckVerdict.OPEN),
        ([{"sums": (0.49,)}], CheckVerdict.OPEN),
        ([{"sums": (0.5,)}], CheckVerdict.PASSED),
        ([{}, {}], CheckVerdict.CONVICTED),
        ([{"sums": (0.4,)}, {"sums": (0.4,)}], CheckVerdict.CONVICTED),
        ([{"sums": (0.4,)}, {"sums": (0.6,)}], CheckVerdict.PASSED),
    ],
)
def test_sums_may_differ_as_much_as_rounding_explains_and_no_more(said, verdict):
    assert sums_that_differ(*said).judge(FAR).verdict is verdict


@pytest.mark.parametrize(
    ("lengths", "apart", "verdict"),
    [
        ({}, (8.0,), CheckVerdict.DISPUTED),
        ({"output": 0.5}, (8.0,), CheckVerdict.PASSED),
        ({"output": 0.5}, (9.0,), CheckVerdict.DISPUTED),
        ({"output": 0.5}, (), CheckVerdict.DISPUTED),  # said by an earlier version
        ({"gradient": 0.5}, (8.0,), CheckVerdict.DISPUTED),
    ],
)
def test_a_bundle_may_differ_as_much_as_rounding_explains_and_no_more(lengths, apart, verdict):
    one = SpotCheck(1, "c", "a")
    one.accepted([CheckedPiece(0, 0, 4)])
    (opinion,) = one.opinions
    (piece,) = opinion.next()
    assert one.goes(opinion, piece, CheckRoute("a", "a", "d"))
    one.weighed("a", measured(**lengths))
    assert one.done("a", 0, 0)
    said = word("d", 4, back=False, differ=("c",)).model_copy(update={"apart": apart})
    assert one.compared("d", said)
    assert one.judge(FAR, alone=True).verdict is verdict
    assert (one.unfinished(FAR).verdict is CheckVerdict.LAPSED) == (verdict is CheckVerdict.PASSED)
