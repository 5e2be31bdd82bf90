"""What a holder remembers of what others have given it."""

import numpy as np

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import StepId
from hetpeer.averaging.member.kept_fingerprints import GivenInput, GivenInputs
from hetpeer.stages.block.fingerprint import PLACES, pack
from hetpeer.stages.pipeline import effects as p

STEP = StepId(m.TermView(term=1, view=0), 3)
KEY = p.TaskKey(5, 2)
TRUE, FALSE = pack(np.ones(PLACES)), pack(-np.ones(PLACES))


def given():
    keys = iter((b"first", b"second"))
    return GivenInputs(lambda: next(keys), tolerance=1e-3)


def used(book, sender, marks=TRUE, key=KEY, *, back=False, exact=b""):
    seen = book.used(STEP, key, key.begin, sender, back=back)
    seen.marks, seen.exact, seen.digest = marks, exact, marks[:16]


def compared(book, marks=TRUE, *, back=False, exact=b""):
    bundle = p.CompareBundle(7, KEY.id, KEY.begin, back, "checker", "handle")
    word = book.compared(STEP, bundle, GivenInput(KEY, KEY.begin, back, "checker", marks, exact))
    assert (word.step, word.check, word.id, word.border, word.back) == (3, 7, 5, 2, back)
    assert word.peer == "checker"
    return word.alike, word.differ


def test_a_checkers_bundle_is_compared_with_what_others_have_sent_in_its_place():
    book = given()
    assert compared(book) == ((), ()), "nothing was used"
    used(book, "u")
    used(book, "liar", FALSE)
    used(book, "back", back=True)
    used(book, "elsewhere", FALSE, p.TaskKey(5, 3))
    used(book, "again", FALSE, p.TaskKey(5, 2, 7))
    assert compared(book) == (("u",), ("liar",))
    assert compared(book, TRUE, back=True) == (("back",), ())
    assert compared(book, FALSE, back=True) == ((), ("back",))


def test_who_has_sent_two_different_ones_has_not_sent_the_same():
    book = given()
    used(book, "u")
    used(book, "u", FALSE)
    assert compared(book) == ((), ("u",))


def test_rounding_is_no_difference_and_a_number_that_is_not_rounded_is_one():
    book = given()
    used(book, "u", pack(np.ones(PLACES) * (1 + 1e-5)), exact=b"ids")
    assert compared(book, exact=b"ids") == (("u",), ())
    assert compared(book, exact=b"others") == ((), ("u",))


def test_what_is_not_fingerprinted_yet_is_not_compared():
    book = given()
    book.used(STEP, KEY, 2, "u")
    assert compared(book) == ((), ())
    assert book.show(STEP, 0) == ()


def test_it_shows_what_was_used_for_a_check_or_for_what_counts():
    book = given()
    used(book, "u")
    used(book, "d", back=True)
    used(book, "lender", key=p.TaskKey(5, 2, 7))
    assert [(one.peer, one.id, one.begin, one.back) for one in book.show(STEP, 0)] == [
        ("u", 5, 2, False),
        ("d", 5, 2, True),
    ]
    assert [one.peer for one in book.show(STEP, 7)] == ["lender"]
    assert book.show(STEP, 8) == ()


def test_a_step_has_a_key_of_its_own_and_is_forgotten():
    book = given()
    assert book.secret(STEP) == b"first"
    used(book, "u")
    assert book.secret(STEP) == b"first"
    book.end_step(STEP)
    assert compared(book) == ((), ())
    assert book.secret(STEP) == b"second"
