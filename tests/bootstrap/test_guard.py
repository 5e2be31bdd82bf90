"""Contributions that are much longer than others."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.guard import ENOUGH, FACTOR, RECENT, Guard, lengths

LINE = m.Line(term=1, view=0)


def seen(length, block=0, peer="a"):
    return {(block, peer): length}


def usual(length=1.0, times=ENOUGH):
    guard = Guard()
    for _ in range(times):
        guard.committed(seen(length))
    return guard


def test_what_is_much_longer_than_the_middle_one_is_unusual():
    guard = usual()
    assert guard.unusual(seen(FACTOR)) == set()
    assert guard.unusual(seen(1.01 * FACTOR) | seen(1.0, peer="b")) == {"a"}
    assert guard.unusual(seen(100.0, block=1)) == set(), "of that block nothing is known"


def test_before_enough_are_known_nothing_is_unusual():
    assert usual(times=ENOUGH - 1).unusual(seen(1e9)) == set()


def test_what_was_long_ago_is_forgotten():
    guard = usual()
    for _ in range(RECENT):
        guard.committed(seen(20.0))
    assert guard.unusual(seen(100.0)) == set()


def vote(*known):
    said = tuple(m.Length(block=block, peer=peer, squared=squared) for block, peer, squared in known)
    return m.Vote(line=LINE, step=0, plan=1, blocks=(), lengths=said)


def test_reducers_have_parts_of_it_and_it_counts_by_the_id():
    votes = [vote((0, "a", 36.0), (0, "b", 1.0)), vote((0, "a", 28.0), (1, "a", 4.0), (2, "x", 9.0))]
    covers = {0: [("a", (1, 2)), ("b", (3,)), ("c", (4,))], 1: [("a", (1, 2))], 2: []}
    assert lengths(votes, covers) == pytest.approx({(0, "a"): 4.0, (0, "b"): 1.0, (1, "a"): 1.0})
