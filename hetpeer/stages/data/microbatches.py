"""Arrays of a microbatch, from a manifest and its shards.

The coordinator, volunteers and a replay read data through here. Nothing is fetched, and torch is not
used. The samples of a microbatch are a pure function of the run's seed, so that anybody can compute it again.

A run's training samples are one endless stream: epoch after epoch, each a permutation of the shards and,
within each shard, a permutation of its samples. Every sample comes once in an epoch, and consecutive ones lie
in one or two shards, so a microbatch needs little of the data. Held-out samples come in the order in which
they are stored.

Philox4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011) is counter-based: the key
is (seed, stream), the counter (epoch, shard). Only its raw 64-bit output is used, which numpy keeps stable
across versions and platforms (NEP 19), unlike the distributions of `Generator`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hetpeer.stages.data.sample_weights import Weights
from hetpeer.stages.data.shards import (
    TARGETS,
    TOKENS,
    Array,
    Arrays,
    ArraySpec,
    ShardFile,
    damaged,
    map_shard,
)

ORDER_STREAM, SPLIT_STREAM, FILES_STREAM = 1, 2, 3
"""Second half of the key: the order of training; the shuffle before the held-out samples are split off; the
order in which files of one sample each are read.
"""
EPOCHS_KEPT, SHARDS_KEPT = 2, 8
"""Permutations kept in memory; four bytes for each shard or sample."""

Indices = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True, eq=False)
class ShardPiece:
    """Some samples of one shard: its number in the set, and their numbers in it, in the stream's order."""

    shard: int
    samples: Indices


def permutation(seed: int, stream: int, count: int, *counter: int) -> Indices:
    """The numbers below `count` in an order determined by (seed, stream, up to three counter words).

    Each gets a random 64-bit number by which they are sorted; of two equal ones the smaller comes first.
    """
    words = [0, *counter, 0, 0, 0][:4]
    raw = np.random.Philox(key=[seed, stream], counter=words).random_raw(count)
    return np.argsort(raw, kind="stable").astype(np.int32)


def size_of(number: int, batch_size: int, microbatch_size: int, eval_samples: int | None = None) -> int:
    """Samples of microbatch `number`; a step's last may have fewer.

    Held-out ones come from M on and have `eval_samples` in all; None: all are full.
    """
    left = batch_size - number * microbatch_size
    if left <= 0 and eval_samples is not None:
        left = eval_samples - (number - -(-batch_size // microbatch_size)) * microbatch_size
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


SHARDS_OPEN = 64
"""Shards that stay mapped; only the pages that are read take memory."""


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """The parts of a manifest that decide a microbatch's data. Ids from `microbatches` on are held-out ones.

    plan = DataPlan.of(manifest)
    arrays = MicrobatchReader(folder, plan).microbatch(step=0, number=3)  # name → array
    """

    kind: Literal["text", "arrays"]
    sample: Mapping[str, ArraySpec]
    """Name → array of one sample."""
    train: tuple[ShardFile, ...]
    heldout: tuple[ShardFile, ...]
    seed: int
    batch_size: int
    """Training samples of one step."""
    microbatch_size: int
    eval_microbatches: int
    eval_samples: int | None = None
    """Held-out samples of an evaluation, each once; None: all its microbatches are full."""
    weights: Weights | None = field(default=None, compare=False, repr=False)
    """Weight of each sample in the order of the shards, training ones first; None: they count alike."""

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> DataPlan:
        """The plan of a manifest as plain data, whose fields its reader has checked."""
        data, training = manifest["data"], manifest["training"]
        return cls(
            kind=data["kind"],
            sample={name: _array_spec(fields) for name, fields in data["sample"].items()},
            train=tuple(map(_shard, data["train"])),
            heldout=tuple(map(_shard, data["heldout"])),
            seed=manifest["seed"],
            batch_size=training["batch_size"],
            microbatch_size=training["microbatch_size"],
            eval_microbatches=training["eval_microbatches"],
            eval_samples=training.get("eval_samples"),
        )

    @property
    def microbatches(self) -> int:
        """M: training microbatches of one step."""
        return -(-self.batch_size // self.microbatch_size)

    @property
    def sizes(self) -> list[int]:
        """Samples of each training microbatch of a step."""
        return [self.size_of(number) for number in range(self.microbatches)]

    @property
    def evaluation(self) -> range:
        """The ids of an evaluation."""
        return range(self.microbatches, self.microbatches + self.eval_microbatches)

    def size_of(self, number: int) -> int:
        """Samples of microbatch `number`."""
        return size_of(number, self.batch_size, self.microbatch_size, self.eval_samples)

    @property
    def evaluation_weights(self) -> dict[int, float]:
        """Held-out id → its weight in the mean held-out loss."""
        if self.weights is not None:
            return {number: self._weight(0, number) for number in self.evaluation}
        exact = self.eval_samples is not None
        return {number: self.size_of(number) if exact else 1 for number in self.evaluation}

    def training_weights(self, step: int) -> tuple[float, ...]:
        """Weight of each training microbatch of a step in its mean loss: by default its samples."""
        if self.weights is None:
            return tuple(self.sizes)
        return tuple(self._weight(step, number) for number in range(self.microbatches))

    def _weight(self, step: int, number: int) -> float:
        """Sum of the weights of a microbatch's samples."""
        assert self.weights is not None
        order, _, begin = self._place(step, number)
        first = self._begins[number >= self.microbatches]
        return math.fsum(
            weight
            for piece in order.pieces(begin, self.size_of(number))
            for weight in self.weights[first[piece.shard] + piece.samples].tolist()
        )

    @cached_property
    def _begins(self) -> tuple[list[int], list[int]]:
        """Number of the first sample of each training shard, and of each held-out one."""
        samples = [shard.samples for shard in (*self.train, *self.heldout)]
        begins = [0, *accumulate(samples)]
        return begins[: len(self.train)], begins[len(self.train) : -1]

    def pieces(self, step: int, number: int) -> list[tuple[ShardFile, ShardPiece]]:
        """(shard, samples) of a microbatch, in order. Held-out ones are the same at every step."""
        order, shards, begin = self._place(step, number)
        return [(shards[piece.shard], piece) for piece in order.pieces(begin, self.size_of(number))]

    def shards(self, step: int, number: int) -> list[ShardFile]:
        """The shards that `pieces` reads."""
        order, shards, begin = self._place(step, number)
        return [shards[shard] for shard in order.shards(begin, self.size_of(number))]

    def shards_of_step(self, step: int) -> list[ShardFile]:
        """The shards of all training microbatches of a step."""
        return [self.train[shard] for shard in self._training.shards(step * self.batch_size, self.batch_size)]

    def _place(self, step: int, number: int) -> tuple[SampleOrder, Sequence[ShardFile], int]:
        """(the microbatch's stream, its shards, number of its first sample)."""
        if number < self.microbatches:
            return self._training, self.train, step * self.batch_size + number * self.microbatch_size
        return self._evaluation, self.heldout, (number - self.microbatches) * self.microbatch_size

    @cached_property
    def _training(self) -> SampleOrder:
        return SampleOrder([shard.samples for shard in self.train], self.seed)

    @cached_property
    def _evaluation(self) -> SampleOrder:
        return SampleOrder([shard.samples for shard in self.heldout], None)


def samples_in(tokens: int, length: int) -> int:
    """Windows of `length` tokens plus the next one in a shard of `tokens` tokens."""
    return max(0, tokens - 1) // length


def windows(text: Array, samples: Iterable[int], length: int) -> Arrays:
    """Tokens and targets of `samples` of a shard's text, each [samples, length] int64."""
    cut = np.stack([text[at * length : at * length + length + 1] for at in samples]).astype(np.int64)
    return {TOKENS: cut[:, :-1], TARGETS: cut[:, 1:]}


class MicrobatchReader:
    """Reads microbatches of a run from the shard files in `folder`, which may still be arriving."""

    def __init__(self, folder: Path, plan: DataPlan) -> None:
        self.plan = plan
        self._folder = folder
        self._open = lru_cache(SHARDS_OPEN)(self._opened)

    def microbatch(self, step: int, number: int) -> Arrays:
        """Name → array [size_of(number), …]. Raises `LocalError` HP-DATA-002 for the first bad shard."""
        parts = [self._read(self.open(shard), piece) for shard, piece in self.plan.pieces(step, number)]
        return {name: np.concatenate([part[name] for part in parts]) for name in self.plan.sample}

    def open(self, shard: ShardFile) -> Arrays:
        """The tensors of a shard, mapped, after a check of its content. Raises `LocalError` HP-DATA-002."""
        return self._open(shard)

    def forget(self) -> None:
        """Unmap all files: deleted ones take disk space as long as they are mapped."""
        self._open.cache_clear()

    def _read(self, tensors: Arrays, piece: ShardPiece) -> Arrays:
        if self.plan.kind == "text":
            return windows(tensors[TOKENS], piece.samples, self._length)
        return {name: tensor[piece.samples] for name, tensor in tensors.items()}

    def _opened(self, shard: ShardFile) -> Arrays:
        """Arrays of a shard, mapped from its file. Raises an error if it does not hold the stated samples."""
        path = self._folder / shard.name
        tensors = map_shard(path, shard)
        if self.plan.kind == "text":
            fits = tensors.keys() == {TOKENS} and self._is_text(tensors[TOKENS], shard.samples)
        else:
            wanted = {
                name: (spec.dtype, (shard.samples, *spec.shape)) for name, spec in self.plan.sample.items()
            }
            fits = {name: (tensor.dtype.name, tensor.shape) for name, tensor in tensors.items()} == wanted
        if not fits:
            raise damaged(path, f"it does not hold the {shard.samples} samples the manifest says")
        return tensors

    def _is_text(self, tokens: Array, samples: int) -> bool:
        return (
            tokens.dtype == np.uint8 and tokens.ndim == 1 and samples_in(len(tokens), self._length) == samples
        )

    @property
    def _length(self) -> int:
        return self.plan.sample[TOKENS].shape[0]


def _array_spec(fields: Mapping[str, Any]) -> ArraySpec:
    return ArraySpec(dtype=fields["dtype"], shape=tuple(fields["shape"]))


def _shard(fields: Mapping[str, Any]) -> ShardFile:
    return ShardFile(**{name: fields[name] for name in ("name", "blake3", "bytes", "samples")})
