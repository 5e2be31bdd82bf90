"""What follows when members of a reduce say something against each other."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.disputed_pairs import DisputedPairs
from hetpeer.bootstrap.trust.reduce_complaints import HUGE, ReduceComplaints

LINE = m.TermView(term=1, view=0)


def complaints(*peers, known=None, reducers=None):
    """All of `peers` hold block 0, have sums of it, and add it up."""
    one = ReduceComplaints(known or DisputedPairs(), {})
    cover = m.Cover(
        block=0,
        slots=tuple((peer, (number,)) for number, peer in enumerate(peers)),
        reducers=tuple((peer, 1) for peer in reducers or peers),
        receivers=peers,
    )
    one.begin([cover], dict.fromkeys(peers, (0, 1)))
    return one


def objects(one, peer, to, plan=1):
    message = m.Objection(line=LINE, step=0, plan=plan, block=0, peer=to, why="not finite")
    return one.objected(peer, message, 1)


def missed(one, peer, sums="", parts=""):
    one.missed(peer, m.Missed(line=LINE, step=0, plan=1, sums=tuple(sums), parts=tuple(parts)))


# ── sums that are not what was sent ─────────────────────────────────────────────────────────────────────────


def test_what_is_known_of_two_turns_nobody_out_while_a_third_adds_up():
    one = complaints("a", "b", "c")
    for _ in range(2):
        one.proven({0: {frozenset("ab")}})
        assert one.to_fence() == {}
    one.proven({0: {frozenset("ac")}})
    assert one.to_fence().keys() == {"a"}


def test_of_two_who_is_in_dispute_with_others_too_has_to_go():
    known = DisputedPairs()
    known.add({frozenset("bc"), frozenset("bd")})
    one = complaints("a", "b", known=known)
    one.proven({0: {frozenset("ab")}})
    assert one.to_fence().keys() == {"b"}


def test_who_drowns_all_others_has_to_go():
    one = complaints("a", "b", "c")
    one.drowns({"b"})
    assert one.to_fence() == {"b": HUGE}


# ── parts that cannot be added ──────────────────────────────────────────────────────────────────────────────


def test_a_part_that_one_cannot_add_is_added_by_others():
    one = complaints("a", "b", "c")
    assert objects(one, "a", "b")
    assert one.to_fence() == {}


def test_a_part_that_most_cannot_add_is_its_senders_doing():
    one = complaints("a", "b", "c")
    assert objects(one, "a", "b")
    assert not objects(one, "c", "b")
    assert one.pending
    assert one.to_fence().keys() == {"b"}
    assert one.to_fence() == {}


def test_who_adds_up_nothing_is_not_heard():
    one = complaints("a", "b", "c", reducers="c")
    assert not objects(one, "a", "b")
    assert not one.pending
    assert one.news() == []


def test_who_objects_to_most_is_the_one_who_goes():
    one = complaints("a", "b", "c", "d")
    assert [objects(one, "a", other) for other in "bcd"] == [True, False, False]
    assert one.to_fence().keys() == {"a"}


def test_where_nobody_else_can_add_up_the_accused_goes_first():
    one = complaints("a", "b")
    assert not objects(one, "a", "b")
    assert one.to_fence().keys() == {"b"}
    assert not objects(one, "a", "b")
    assert one.to_fence().keys() == {"a"}


@pytest.mark.parametrize(
    ("peer", "to", "plan"), [("x", "a", 1), ("a", "x", 1), ("a", "a", 1), ("a", "b", 2), ("a", "b", 0)]
)
def test_strangers_oneself_and_other_plans_are_not_objected_to(peer, to, plan):
    one = complaints("a", "b")
    assert not objects(one, peer, to, plan)
    assert not one.pending


# ── plans that run out of time ──────────────────────────────────────────────────────────────────────────────


def test_without_a_word_nothing_follows():
    one = complaints("a", "b", "c")
    assert not one.late()
    assert not one.pending


def test_who_gives_no_sums_adds_up_no_more():
    one = complaints("a", "b", "c", "d")
    missed(one, "a", sums="d")
    assert one.late()
    assert one.to_fence() == {}
    for peer in "abc":
        missed(one, peer, sums="d")
    assert one.late()
    assert one.to_fence().keys() == {"d"}


def test_a_reducer_that_waits_for_a_part_is_excused():
    known = DisputedPairs()
    one = complaints("a", "b", "c", "d", known=known)
    for peer in "ab":
        missed(one, peer, sums="c")
    missed(one, "c", parts="d")
    assert one.late()
    assert known.fit("abcd", "abcd") == ("a", "b"), "it is between these two"


def test_an_excuse_for_everything_is_one_against_everybody():
    one = complaints("a", "b", "c", "d")
    for peer in "abc":
        missed(one, peer, sums="d")
    missed(one, "d", parts="ab")
    one.late()
    assert one.to_fence().keys() == {"d"}


def test_of_two_of_whom_one_waits_one_goes():
    one = complaints("a", "b")
    missed(one, "a", sums="b")
    assert not one.late()
    assert one.to_fence().keys() == {"a"}
    missed(one, "a", sums="b")
    assert not one.late()
    assert one.to_fence().keys() == {"b"}


@pytest.mark.parametrize("peers", ["ab", "abc", "abcd"])
def test_where_most_are_waited_for_it_is_slow_and_nobodys_doing(peers):
    one = complaints(*peers)
    for peer in peers:
        missed(one, peer, sums=set(peers) - {peer}, parts=set(peers) - {peer})
    assert not one.late()
    assert not one.pending
    assert one.news() == []


def test_strangers_have_no_say():
    one = complaints("a", "b", "c")
    missed(one, "x", sums="abc")
    missed(one, "a", sums="x", parts="x")
    assert not one.late()
    assert not one.pending
