"""What a reducer remembers of what others have sent it."""

import numpy as np
import pytest

from hetpeer.averaging.effects import Shard, StepId
from hetpeer.averaging.member.kept_fingerprints import ReceivedParts
from hetpeer.averaging.messages import MOST_RECEIPTS, Mark, TermView
from hetpeer.stages.block.fingerprint import fingerprint, unpack

STEP = StepId(TermView(term=1, view=0), 3)
LENGTH = 1000
KEYS = [bytes([number]) * 16 for number in range(9)]
OTHER = bytes(range(16))
VECTORS = {
    peer: np.random.default_rng(n).standard_normal(LENGTH).astype(np.float32) for n, peer in enumerate("ab")
}


def received(named=(), plan=1, shares=((100, 350), (350, 600)), peers="ab"):
    """Of elements [100, 600) of block 2, in two shards."""
    keys = iter(KEYS)
    book = ReceivedParts(lambda: next(keys))
    for begin, end in shares:
        shard = Shard(plan, 2, 0, begin, end, "me")
        for peer in peers:
            vector = VECTORS.get(peer, VECTORS["a"])
            marks = [
                fingerprint(vector[one.begin : one.end], one.block, one.begin, one.key)
                for one in book.wanted(STEP, shard, named)
            ]
            book.add(STEP, shard, peer, marks, named)
    return book


def mark(begin, end, key):
    return Mark(block=2, begin=begin, end=end, key=key)


def is_of(mark, peer):
    true = fingerprint(VECTORS[peer][mark.begin : mark.end], 2, mark.begin, mark.key)
    return np.allclose(unpack(mark.values), true)


def test_all_of_a_share_is_one_fingerprint_under_a_key_of_the_plan():
    book = received()
    for peer in "ab":
        (one,) = book.of(STEP, 1, peer)
        assert (one.block, one.begin, one.end, one.key) == (2, 100, 600, book.key(STEP, 1))
        assert is_of(one, peer)
    assert book.of(STEP, 1, "c") == book.of(STEP, 2, "a") == ()
    assert book.key(STEP, 2) != book.key(STEP, 1)


@pytest.mark.parametrize("part", [(120, 580), (100, 350), (400, 401)])
def test_what_a_plan_names_is_looked_at_besides(part):
    named = (mark(*part, OTHER),)
    book = received(named)
    receipts = book.testify(STEP, 1, named)
    assert [one.peer for one in receipts] == ["a", "b"]
    assert all(is_of(one.mark, one.peer) and (one.mark.begin, one.mark.end) == part for one in receipts)
    assert len(book.of(STEP, 1, "a")) == 1


def test_who_is_in_question_testifies_of_its_share():
    book = received()
    asked = [mark(100, 600, book.key(STEP, 1)), mark(0, 7, OTHER)]
    assert [one.peer for one in book.testify(STEP, 1, asked)] == ["a", "b"]
    assert book.testify(STEP, 2, asked) == ()
    book.end_step(STEP)
    assert book.testify(STEP, 1, asked) == ()


def test_a_testimony_fits_into_a_message():
    book = received(peers=[str(number) for number in range(MOST_RECEIPTS + 9)], shares=((100, 101),))
    assert len(book.testify(STEP, 1, [mark(100, 101, book.key(STEP, 1))])) == MOST_RECEIPTS
