"""The samples of each microbatch: a pure function of the run's seed, so that anybody can compute it again.

A run's training samples are one endless stream: epoch after epoch, each a permutation of the shards and,
within each shard, a permutation of its samples. Every sample comes once in an epoch, and consecutive ones lie
in one or two shards, so a microbatch needs little of the data. Held-out samples come in the order in which
they are stored.

Philox4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011) is counter-based: the key
is (seed, stream), the counter (epoch, shard). Only its raw 64-bit output is used, which numpy keeps stable
across versions and platforms (NEP 19), unlike the distributions of `Generator`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

ORDER_STREAM, SPLIT_STREAM = 1, 2
"""Second half of the key: the order of training; the shuffle before the held-out samples are split off."""
EPOCHS_KEPT, SHARDS_KEPT = 2, 8
"""Permutations kept in memory; four bytes for each shard or sample."""

Indices = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True, eq=False)
class ShardPiece:
    """Some samples of one shard: its number in the set, and their numbers within it, in the order of the
    stream.
    """

    shard: int
    samples: Indices


def permutation(seed: int, stream: int, count: int, *counter: int) -> Indices:
    """The numbers below `count` in an order determined by (seed, stream, up to three counter words).

    Each gets a random 64-bit number by which they are sorted; of two equal ones the smaller comes first.
    """
    words = [0, *counter, 0, 0, 0][:4]
    raw = np.random.Philox(key=[seed, stream], counter=words).random_raw(count)
    return np.argsort(raw, kind="stable").astype(np.int32)


def size_of(number: int, batch_size: int, microbatch_size: int) -> int:
    """Samples of microbatch `number` of a step; the last one may have fewer. Held-out ones, from M on, are
    full.
    """
    left = batch_size - number * microbatch_size
    return min(left, microbatch_size) if left > 0 else microbatch_size


class SampleOrder:
    """The endless stream of one set's samples. `counts` are the samples of its shards, at least 1 each.

    With a seed it is the order of training; without, the shards' own order, repeated, for evaluations.
    """

    def __init__(self, counts: Sequence[int], seed: int | None) -> None:
        self.total = sum(counts)
        self._counts = tuple(counts)
        self._seed = seed
        self._epoch = lru_cache(EPOCHS_KEPT)(self._shards_of)
        self._within = lru_cache(SHARDS_KEPT)(self._samples_of)

    def pieces(self, begin: int, count: int) -> list[ShardPiece]:
        """The samples [begin, begin + count) of the stream."""
        return [
            ShardPiece(shard, self._within(epoch, shard)[first : first + some])
            for epoch, shard, first, some in self._runs(begin, count)
        ]

    def shards(self, begin: int, count: int) -> list[int]:
        """The shards that `pieces` needs, in the order in which they come."""
        return list(dict.fromkeys(shard for _, shard, _, _ in self._runs(begin, count)))

    def _runs(self, begin: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """(epoch, shard, position in the shard's permutation, how many samples from there) of each run."""
        end = begin + count
        while begin < end:
            epoch, position = divmod(begin, self.total)
            shards, ends = self._epoch(epoch)
            place = bisect_right(ends, position)
            shard = int(shards[place])
            some = min(end - begin, ends[place] - position)
            yield epoch, shard, position - (ends[place] - self._counts[shard]), some
            begin += some

    def _shards_of(self, epoch: int) -> tuple[Indices, list[int]]:
        """(the shards of an epoch in order, the position behind the last sample of each)."""
        shards = self._permutation(len(self._counts), epoch, 0)
        return shards, list(accumulate(self._counts[shard] for shard in shards))

    def _samples_of(self, epoch: int, shard: int) -> Indices:
        return self._permutation(self._counts[shard], epoch, shard + 1)

    def _permutation(self, count: int, *counter: int) -> Indices:
        if self._seed is None:
            return np.arange(count, dtype=np.int32)
        return permutation(self._seed, ORDER_STREAM, count, *counter)
