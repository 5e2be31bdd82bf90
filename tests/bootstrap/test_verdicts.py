"""What follows from words on bundles: of those who have computed from them, and of what they have been
computed from.
"""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.trust.checker_reports import AwaitedWord, CheckerReport
from hetpeer.bootstrap.trust.verdicts import CheckCase, CheckOutcome, CheckVerdict


def equal(_block, one, other):
    return one == other


OUT, BACK = (7, False), (3, True)
"""Border, and whether it is the gradient."""
NEIGHBOURS = ("d", "e", "f")
TRUE = {"d": "alike", "e": "alike", "f": "alike"}


def opinion(checker, said, where=OUT, given="", suspect="c"):
    """`said`: neighbour → what it thinks of the checker's bundle; `given`: who has given the checker
    something, and what.
    """
    border, back = where
    one = CheckerReport(checker)
    for number, (neighbour, thinks) in enumerate(said.items()):
        word = AwaitedWord(neighbour, number, border, back)
        one._awaited.add(word)
        assert one.said(word, *{"alike": ((suspect,), ()), "differs": ((), (suspect,)), "": ((), ())}[thinks])
    one.given = sources(given)
    return one


def sources(given):
    giver, what = given.split() if given else ("", "")
    found = m.Given(id=0, begin=3, back=False, peer=giver, digest=what.encode())
    return {(0, 3, False): found} if given else {}


def judged(*opinions, given="", alone=False):
    return CheckCase("c", {}, sources(given), opinions, equal).judge(alone=alone)


def against(*accusers):
    return TRUE | dict.fromkeys(accusers, "differs")


@pytest.mark.parametrize("where", [OUT, BACK])
@pytest.mark.parametrize(
    ("first", "second", "verdict", "culprit", "apart"),
    [
        (against("d", "e"), against("d", "e"), CheckVerdict.CONVICTED, "c", {"cd", "ce"}),
        (against("d", "e", "f"), against("d", "e"), CheckVerdict.CONVICTED, "c", {"cd", "ce"}),
        (against("d", "e"), TRUE, CheckVerdict.CONVICTED, "a", set()),
        (against("d"), against("d"), CheckVerdict.DISPUTED, "d", {"cd"}),
        (against("d"), TRUE, CheckVerdict.DISPUTED, "d", set()),
        (against("d", "e"), against("f"), CheckVerdict.DISPUTED, "a", set()),
        ({"d": "differs"}, {"d": "differs"}, CheckVerdict.DISPUTED, "d", {"cd"}),
    ],
)
def test_more_than_one_and_most_of_them_and_a_third_convict(where, first, second, verdict, culprit, apart):
    assert judged(opinion("a", first, where)).verdict is CheckVerdict.OPEN
    outcome = judged(opinion("a", first, where), opinion("b", second, where))
    assert outcome.verdict is verdict
    assert outcome.culprit == culprit
    assert outcome.apart == frozenset(map(frozenset, apart))


def test_a_checker_is_not_convicted_by_what_others_have_not_said_yet_of_a_second_one():
    first, second = opinion("a", against("d", "e")), opinion("b", {"f": "alike"})
    second._awaited.add(AwaitedWord("d", 7, *OUT))
    outcome = judged(first, second, alone=True)
    assert outcome.verdict is CheckVerdict.DISPUTED
    assert outcome.apart == frozenset(map(frozenset, ("cd", "ce")))
    assert outcome.witness == "a"
    assert second.said(AwaitedWord("d", 7, *OUT), ("c",), ())
    assert judged(first, second).culprit == "a"


def test_nobody_says_anything_against_it_or_has_anything_to_compare():
    assert judged(opinion("a", TRUE)).verdict is CheckVerdict.PASSED
    assert judged(opinion("a", {"d": ""})).verdict is CheckVerdict.LAPSED


def test_who_has_been_given_something_else_than_both_checkers_is_not_convicted():
    """Its lender has lent something else than it had sent, or it says so falsely: both are kept apart."""
    two = (opinion("a", against("d", "e"), given="u x"), opinion("b", against("d", "e"), given="u x"))
    assert judged(*two, given="u x").verdict is CheckVerdict.CONVICTED
    assert judged(*two, given="v x").verdict is CheckVerdict.CONVICTED, "it is the same, whoever gave it"
    outcome = judged(*two, given="u y")
    assert outcome == CheckOutcome(CheckVerdict.DISPUTED, "u", "c", frozenset({frozenset("cu")}))
    outcome = judged(*two, given="v y")
    assert outcome.apart == frozenset(map(frozenset, ("cu", "cv"))), "one of these two, or it lies itself"
    assert judged(*two).verdict is CheckVerdict.CONVICTED, "it has no excuse"


def test_a_checker_that_has_been_given_something_else_is_not_convicted():
    first, second = opinion("a", against("d", "e"), given="u y"), opinion("b", TRUE, given="u x")
    outcome = judged(first, second, given="u x")
    assert outcome == CheckOutcome(CheckVerdict.DISPUTED, "u", "a")


def test_who_sends_on_something_false_to_one_before_it_and_one_behind_it_is_contradicted_by_two():
    first = opinion("a", {"d": "differs"}, OUT)
    first.accusations |= opinion("a", {"u": "differs"}, BACK).accusations
    assert judged(first, opinion("b", {"d": "alike"}, OUT)) == CheckOutcome(CheckVerdict.CONVICTED, "a")


def test_two_opinions_of_different_things_convict_nobody():
    first, second = (
        opinion("a", against("d", "e"), given="u x"),
        opinion("b", against("d", "e"), given="u y"),
    )
    outcome = judged(first, second, given="u x")
    assert outcome.verdict is CheckVerdict.DISPUTED
    assert outcome.apart == frozenset(map(frozenset, ("cd", "ce"))), "both find the same"


def test_what_somebody_else_gave_is_found_false_too():
    """It was not counted, but others have computed from it."""
    said = (opinion("a", {"d": "differs"}, suspect="x"), opinion("b", {"d": "differs"}, suspect="x"))
    assert judged(said[0]).verdict is CheckVerdict.OPEN
    assert judged(*said) == CheckOutcome(CheckVerdict.DISPUTED, "d", "x", frozenset({frozenset("dx")}))


def test_without_a_third_nobody_is_convicted_and_the_two_are_kept_apart():
    first = opinion("a", against("d", "e"), given="u x")
    outcome = judged(first, alone=True)
    assert outcome.apart == frozenset(map(frozenset, ("cd", "ce")))
    assert outcome.witness == "a", "it is the word of one checker"
    assert judged(first, given="u y", alone=True).apart == frozenset({frozenset("cu")})
    assert CheckCase("c", {}, {}, [first], equal).unfinished().verdict is CheckVerdict.DISPUTED
    assert CheckCase("c", {}, {}, [opinion("a", TRUE)], equal).unfinished().verdict is CheckVerdict.LAPSED
