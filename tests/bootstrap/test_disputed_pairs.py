"""Who adds up nothing for whom any more, and who has to go."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.disputed_pairs import (
    CLOSELY,
    LONGEST,
    MAX_PAIRS,
    REMEMBERED,
    SHUNNED_REST,
    TIMES,
    DisputedPairs,
)
from hetpeer.bootstrap.trust.reduce_complaints import disputes, spoilers

LINE = m.TermView(term=1, view=0)


def pairs(*names):
    return {frozenset(name) for name in names}


@pytest.fixture
def known():
    return DisputedPairs()


# ── what is remembered ──────────────────────────────────────────────────────────────────────────────────────


def test_neither_adds_up_for_the_other_whatever_the_dispute_is_about(known):
    assert known.fit("abc", "abc") == ("a", "b", "c")
    assert known.add(pairs("ab"))
    assert known.fit("abc", "abc") == ("c",)
    assert known.fit("abc", "ac") == ("a", "c"), "b has no part in it"
    assert known.add(pairs("bc"), late=True)
    assert known.fit("abc", "bc") == ()


def test_who_is_in_dispute_with_most_does_not_take_the_others_with_it(known):
    known.add(pairs("ad", "bd", "cd"))
    assert known.fit("abcd", "abcd") == ("a", "b", "c")


def test_the_same_dispute_is_no_news_and_is_forgotten_in_the_end(known):
    assert known.add(pairs("ab"))
    assert not known.add(pairs("ab"))
    for _ in range(REMEMBERED):
        assert known.fit("ab", "ab") == ()
        known.committed()
    assert known.fit("ab", "ab") == ("a", "b")
    assert known.add(pairs("ab"))


def test_blocks_are_looked_at_closely_for_a_while(known):
    known.look_closely([3, 1])
    for _ in range(CLOSELY):
        assert known.closely(range(3)) == (1,)
        known.committed()
    assert known.closely(range(4)) == ()


def test_who_spoils_sums_adds_up_no_more_and_all_of_several_are_the_models_doing(known):
    known.spoils("a")
    assert known.fit("abc", "abc") == ("b", "c")
    assert not known.have_all_spoilt("a"), "it is alone there"
    known.spoils("b")
    assert known.have_all_spoilt("ab")
    assert not known.have_all_spoilt("abc")


def test_no_more_are_remembered_than_there_is_room_for_and_the_others_are_no_news(known):
    many = {frozenset((f"{a}", f"{b}")) for a in range(200) for b in range(a)}
    assert len(known.add(many)) == MAX_PAIRS
    assert known.add(many) == set()


def rested(known, peer):
    """Commits until `peer` rests no more."""
    commits = 0
    while peer in known.resting:
        known.committed()
        commits += 1
    return commits


def test_who_was_waited_for_in_vain_rests_ever_longer(known):
    found = []
    for _ in range(LONGEST + 1):
        known.waited_in_vain("a")
        found.append(rested(known, "a"))
    assert found[:4] == [2, 4, 8, 16]
    assert max(found) <= 2**LONGEST


def test_who_was_shunned_rests_ever_longer_and_who_was_fenced_otherwise_does_not(known):
    known.fenced("a", shunned=False)
    assert rested(known, "a") == 0
    found = []
    for _ in range(TIMES - 1):
        known.fenced("a", shunned=True)
        found.append(rested(known, "a"))
    assert found == [SHUNNED_REST, 2 * SHUNNED_REST]


# ── who has to go ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("disputes", "holders", "shunned"),
    [
        (["ab"], "ab", ""),
        (["ab"], "abc", ""),
        (["ab", "ac"], "abc", "a"),
        (["ab", "ac"], "abcde", ""),
        (["ab", "ac", "ad"], "abcde", "a"),
        (["ab", "ac", "bc"], "abc", "abc"),
        (["ab", "ac"], "bc", ""),
    ],
)
def test_one_is_shunned_by_most_others_and_by_more_than_one(known, disputes, holders, shunned):
    known.add(pairs(*disputes))
    assert known.shunned(holders) == set(shunned)
    assert known.shunned(holders, late=True) == set()


def test_of_two_it_is_now_the_one_and_now_the_other(known):
    blamed = []
    for _ in range(4):
        blamed.append(known.blamed("ab", accused="b"))
        known.fenced(blamed[-1], shunned=False)
    assert blamed == ["b", "a", "b", "a"]
    assert not known.is_done_with("a")


def test_who_was_shunned_several_times_does_not_come_back(known):
    for times in range(TIMES):
        assert not known.is_done_with("a"), times
        known.fenced("a", shunned=True)
    assert known.is_done_with("a")


# ── what votes show ─────────────────────────────────────────────────────────────────────────────────────────


def vote(digest, received, *, finite=True, block=0):
    """`received`: (block, reducer) → digest; one that ends in "!" is no number."""
    return m.Vote(
        line=LINE,
        step=0,
        plan=1,
        blocks=(m.BlockVote(block=block, digest=digest, squared_norm=1.0, finite=finite),),
        received=tuple(
            m.Received(block=block, of=of, reducer=reducer, digest=seen, finite=not seen.endswith("!"))
            for (of, reducer), seen in received.items()
        ),
    )


def both(a, b):
    return {(0, "a"): a, (0, "b"): b}


@pytest.mark.parametrize(
    ("votes", "found"),
    [
        ({"a": ("x", both("1", "2")), "b": ("y", both("0", "2"))}, ["ab"]),
        ({"a": ("x", both("1", "2")), "b": ("x", both("1", "2")), "c": ("y", both("1", "0"))}, ["bc"]),
        ({"a": ("x", both("1", "2")), "b": ("y", both("0", "2")), "c": ("y", both("0", "2"))}, ["ab", "ac"]),
        ({"a": ("x", both("1", "2")), "b": ("x", both("1", "2")), "c": ("y", both("1", "2"))}, ["ac", "bc"]),
    ],
    ids=[
        "of two",
        "a reducer and who says otherwise",
        "a reducer and all others",
        "alike, but for the whole",
    ],
)
def test_who_differs_from_the_reducer_is_in_dispute_with_it(votes, found):
    assert disputes({peer: vote(*said) for peer, said in votes.items()}, 0) == pairs(*found)


def test_a_reducer_of_a_tied_block_has_no_say_of_its_own_and_most_decide():
    votes = {peer: vote(peer, {(5, "r"): seen}) for peer, seen in {"a": "1", "b": "1", "c": "2"}.items()}
    assert disputes(votes, 0) == pairs("rc")
    del votes["b"]
    assert disputes(votes, 0) == pairs("ra", "rc"), "nobody knows which of the two"


def test_a_norm_alone_is_a_dispute_too():
    one, other = vote("x", both("1", "2")), vote("x", both("1", "2"))
    lies = other.model_copy(update={"blocks": (other.blocks[0].model_copy(update={"squared_norm": 2.0}),)})
    assert disputes({"a": one, "b": lies}, 0) == pairs("ab")


def test_a_sum_is_spoilt_if_most_of_those_who_have_it_say_so_and_by_a_reducer():
    spoilt = vote("x", both("1", "2!"), finite=False)
    framing = vote("x", both("1!", "2"), finite=False)
    assert spoilers({"a": spoilt, "b": spoilt, "c": framing}, 0, "ab") == {"b"}
    assert spoilers({"a": spoilt, "b": framing}, 0, "ab") == set(), "word against word"
    assert spoilers({"a": spoilt}, 1, "ab") == set()
    invented = vote("x", both("1!", "2!") | {(0, name): "3!" for name in "xyz"}, finite=False)
    assert spoilers({"a": invented}, 0, "a") == {"a"}


def test_who_does_not_say_what_came_from_whom_is_in_dispute_with_those_who_vote_otherwise():
    """It is of an older version, or hides something."""
    votes = {"a": ("x", both("1", "2")), "b": ("x", both("1", "2")), "c": ("y", {})}
    assert disputes({peer: vote(*said) for peer, said in votes.items()}, 0) == pairs("ac", "bc")
    spoilt = vote("x", both("1", "2!"), finite=False)
    silent = vote("x", {}, finite=False)
    assert spoilers({"a": spoilt, "b": silent, "c": silent}, 0, "ab") == {"b"}
