"""Contributions that are much longer than others."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.outliers import ENOUGH, FACTOR, RECENT, LengthOutliers, lengths

LINE = m.TermView(term=1, view=0)


def seen(length, block=0, peer="a", ids=1):
    return {(block, peer): (length / ids, length / ids**0.5)}


def usual(length=1.0, times=ENOUGH):
    guard = LengthOutliers()
    for _ in range(times):
        guard.committed(seen(length))
    return guard


def test_what_is_much_longer_than_the_middle_one_is_unusual():
    guard = usual()
    assert guard.unusual(seen(FACTOR)) == set()
    assert guard.unusual(seen(1.01 * FACTOR) | seen(1.0, peer="b")) == {"a"}
    assert guard.unusual(seen(100.0, block=1)) == set(), "of that block nothing is known"


def test_sums_of_many_ids_may_grow_by_their_number_or_by_its_root():
    guard = usual()
    assert guard.unusual(seen(400.0, ids=400)) == set(), "they point the same way"
    assert guard.unusual(seen(20.0 * FACTOR, ids=400)) == set()
    noise = LengthOutliers()
    for _ in range(ENOUGH):
        noise.committed(seen(20.0, ids=400))
    assert noise.unusual(seen(1.0)) == set(), "one id of the same noise is 20 times as long by its number"


def test_before_enough_are_known_or_where_all_was_nothing_nothing_is_unusual():
    assert usual(times=ENOUGH - 1).unusual(seen(1e9)) == set()
    assert usual(0.0).unusual(seen(1e9)) == set()


def test_what_was_long_ago_is_forgotten_and_what_is_unusual_does_not_become_usual():
    guard = usual()
    for _ in range(RECENT):
        guard.committed(seen(20.0))
    assert guard.unusual(seen(100.0)) == {"a"}
    for _ in range(RECENT):
        guard.committed(seen(9.0))
    assert guard.unusual(seen(80.0)) == set()


def vote(*known):
    said = tuple(m.Length(block=block, peer=peer, squared=squared) for block, peer, squared in known)
    return m.Vote(line=LINE, step=0, plan=1, blocks=(), lengths=said)


def test_each_reducer_knows_its_share_and_the_middle_one_counts():
    cover = m.Cover(
        block=0,
        slots=(("a", (1, 2)), ("b", (3,)), ("c", (4,))),
        reducers=(("a", 1), ("b", 2), ("c", 1)),
        receivers=("a", "b", "c", "d"),
    )
    votes = {
        "a": vote((0, "a", 16.0), (0, "b", 1.0)),
        "b": vote((0, "a", 32.0), (0, "b", 1e300)),
        "c": vote((0, "a", 1e300), (0, "b", 1.0), (1, "a", 5.0)),
        "d": vote((0, "c", 1e300)),
    }
    found = lengths(votes, [cover])
    assert found.keys() == {(0, "a"), (0, "b")}, "d has no share"
    assert found[0, "a"] == pytest.approx((4.0, 8.0 / 2**0.5))
    assert found[0, "b"] == pytest.approx((2.0, 2.0))
