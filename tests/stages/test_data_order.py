"""The data order is a pure function whose values are part of the format: they may never change."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.stages.data.microbatches import SampleOrder, permutation, size_of

COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def drawn(order: SampleOrder, begin: int, count: int) -> list[tuple[int, int]]:
    """(shard, sample) one by one."""
    return [(piece.shard, int(s)) for piece in order.pieces(begin, count) for s in piece.samples]


def test_known_values() -> None:
    assert permutation(7, 1, 8, 3, 2).tolist() == [4, 6, 7, 3, 2, 5, 1, 0]
    epoch = [(1, 1), (1, 0), (2, 1), (2, 2), (2, 0), (2, 3), (0, 2), (0, 1), (0, 0)]
    assert drawn(SampleOrder([3, 2, 4], seed=7), 0, 10) == [*epoch, (2, 3)]


def test_known_order_is_the_documented_one() -> None:
    """Raw words of the counter-based generator, sorted: written down again, by the formula in the
    docstring.
    """
    raw = np.random.Philox(key=[7, 1], counter=[0, 3, 2, 0]).random_raw(8).tolist()
    assert permutation(7, 1, 8, 3, 2).tolist() == sorted(range(8), key=lambda i: (raw[i], i))


def test_every_word_of_the_key_and_the_counter_matters() -> None:
    draws = {
        permutation(*arguments).tobytes()
        for arguments in [
            (7, 1, 40, 3, 2),
            (8, 1, 40, 3, 2),
            (7, 2, 40, 3, 2),
            (7, 1, 40, 4, 2),
            (7, 1, 40, 3, 3),
        ]
    }
    assert len(draws) == 5


@given(counts=COUNTS, seed=st.integers(0, 2**60 - 1), epoch=st.integers(0, 2**40))
def test_every_sample_comes_once_in_every_epoch(counts: list[int], seed: int, epoch: int) -> None:
    order = SampleOrder(counts, seed)
    everything = [(shard, sample) for shard, count in enumerate(counts) for sample in range(count)]
    assert sorted(drawn(order, epoch * order.total, order.total)) == everything


@given(counts=COUNTS, seed=st.integers(0, 9), begin=st.integers(0, 60), count=st.integers(1, 60))
def test_shards_are_finished_before_others_are_begun(
    counts: list[int], seed: int, begin: int, count: int
) -> None:
    """Between two borders of epochs a shard is entered once; so a run no longer than the shards touches
    two of them.
    """
    order = SampleOrder(counts, seed)
    samples = drawn(order, begin, count)
    for first in range(0, begin + count, order.total):
        epoch = samples[max(0, first - begin) : max(0, first + order.total - begin)]
        entered = [shard for (before, _), (shard, _) in pairwise([(-1, 0), *epoch]) if shard != before]
        assert len(entered) == len(set(entered))
    assert order.shards(begin, count) == list(dict.fromkeys(shard for shard, _ in samples))
    if begin % order.total + count <= order.total and count <= min(counts):
        assert len(order.shards(begin, count)) <= 2


@given(counts=COUNTS, seed=st.integers(0, 9), begin=st.integers(0, 10**6), count=st.integers(0, 40))
def test_it_depends_on_nothing_else(counts: list[int], seed: int, begin: int, count: int) -> None:
    """Whatever was asked before, in however many parts."""
    used, fresh = SampleOrder(counts, seed), SampleOrder(counts, seed)
    for position in reversed(range(0, 100, 7)):
        used.pieces(position, 5)
    together = drawn(used, begin, count)
    assert together == drawn(fresh, begin, count)
    assert together == [one for at in range(begin, begin + count) for one in drawn(fresh, at, 1)]


def test_epochs_differ() -> None:
    order = SampleOrder([20, 20], seed=0)
    assert drawn(order, 0, 40) != drawn(order, 40, 40)


@given(counts=COUNTS, begin=st.integers(0, 100), count=st.integers(0, 40))
def test_without_a_seed_samples_come_as_they_are_stored_again_and_again(
    counts: list[int], begin: int, count: int
) -> None:
    stored = [(shard, sample) for shard, length in enumerate(counts) for sample in range(length)]
    expected = [stored[at % len(stored)] for at in range(begin, begin + count)]
    assert drawn(SampleOrder(counts, None), begin, count) == expected


def test_orders_are_spread_evenly() -> None:
    """Of 5 samples each comes first about as often: within five standard deviations of a fair draw."""
    firsts = [int(permutation(1, 1, 5, epoch)[0]) for epoch in range(5000)]
    assert abs(np.bincount(firsts, minlength=5) - 1000).max() < 5 * np.sqrt(5000 * 0.2 * 0.8)


def test_large_seed_and_epoch() -> None:
    assert len(SampleOrder([2, 2], 2**60 - 1).pieces(2**62, 4)) >= 2


@pytest.mark.parametrize(
    ("batch", "microbatch", "sizes"), [(8, 4, [4, 4]), (10, 4, [4, 4, 2]), (3, 3, [3]), (5, 4, [4, 1])]
)
def test_the_last_microbatch_has_what_is_left(batch: int, microbatch: int, sizes: list[int]) -> None:
    assert [size_of(number, batch, microbatch) for number in range(len(sizes))] == sizes
    assert [size_of(number, batch, microbatch) for number in range(len(sizes), len(sizes) + 3)] == [
        microbatch
    ] * 3


def test_held_out_microbatches_have_the_stated_samples_in_all() -> None:
    assert [size_of(number, 10, 4, 9) for number in range(6)] == [4, 4, 2, 4, 4, 1]
    assert size_of(3, 10, 4, 4) == 4
