"""What is said of held-out microbatches, and which of it counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.bootstrap.evaluations import Evaluations

FIRST, COUNT = 6, 2
HOLDERS = ("a", "b", "c")


def checked():
    return Evaluations(FIRST, COUNT, checked=True)


def test_without_checks_the_first_word_counts_of_whoever_can_know():
    found = Evaluations(FIRST, COUNT)
    assert found.said("z", {6: 9.0, 7: 9.0}, HOLDERS) is None, "it does not hold the last block"
    assert found.said("a", {6: 4.0, 3: 5.0, 8: 5.0}, HOLDERS) == []
    assert found.said("b", {6: 9.0}, HOLDERS) is None
    assert set(found.wanted) == {7}
    assert found.said("a", {7: 6.0}, HOLDERS) == []
    assert (found.loss, found.differed, len(found.wanted)) == (5.0, 0, 0)


def test_with_checks_two_say_it():
    found = checked()
    assert (list(found.first), list(found.second)) == ([6, 7], [8, 9])
    assert list(found.others(8)) == [6]
    assert list(found.others(11)) == [7, 9]
    assert found.said("a", {6: 4.0, 9: 6.001}, HOLDERS) == []
    assert found.said("a", {8: 4.0, 7: 6.0}, HOLDERS) is None, "it has spoken on these samples"
    assert found.said("b", {8: 4.001, 7: 6.0}, HOLDERS) == []
    assert not found.wanted
    assert (found.loss, found.differed) == (5.0, 0), "of two that are alike the first opinion's"


@pytest.mark.parametrize("order", ["liar first", "liar second"])
def test_where_two_differ_a_third_decides(order):
    found, (one, other) = checked(), ("ab" if order == "liar first" else "ba")
    said = {"a": {6: 1.0, 7: 6.0}, "b": {8: 4.0, 9: 6.0}}
    assert found.said(one, said[one], HOLDERS) == []
    assert found.said(other, said[other], HOLDERS) == [10]
    assert set(found.wanted) == {10}
    assert found.said("b", {10: 4.0}, HOLDERS) is None, "nobody is heard twice"
    assert found.said("c", {10: 4.02}, HOLDERS) == []
    assert (found.loss, found.differed) == (5.0, 1)


def test_where_there_is_no_third_it_is_said_that_they_differ():
    found = checked()
    found.said("a", {6: 1.0, 7: 6.0}, ("a", "b"))
    assert found.said("b", {8: 4.0, 9: 6.0}, ("a", "b")) == []
    assert (found.loss, found.differed, len(found.wanted)) == (3.5, 1, 0)


def test_the_third_may_be_anybody_once_nobody_else_is_left():
    found = checked()
    found.said("a", {6: 1.0, 7: 6.0}, HOLDERS)
    found.said("b", {8: 4.0, 9: 6.0}, HOLDERS)
    assert found.said("b", {10: 4.0}, ("a", "b")) == []
    assert found.loss == 5.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(HOLDERS),
            st.dictionaries(st.integers(0, 14), st.floats(0.1, 9.0), max_size=4),
        ),
        max_size=30,
    )
)
def test_one_liar_of_three_moves_nothing_far(words):
    """`a` says anything of any id at any time; the others compute what is open."""
    truth = {0: 4.0, 1: 6.0}
    found = checked()
    for peer, losses in words:
        theirs = {i: truth[(i - FIRST) % COUNT] for i in losses}
        found.said(peer, losses if peer == "a" else theirs, HOLDERS)
    for peer in "bcbc":
        found.said(peer, {i: truth[(i - FIRST) % COUNT] for i in found.wanted}, HOLDERS)
    assert not found.wanted
    assert found.loss == pytest.approx(5.0, rel=0.01)
