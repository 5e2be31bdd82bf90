"""From a manifest and its shards to the arrays of a microbatch.

The coordinator, volunteers and the reference read data through here. Nothing is fetched, and torch is not
used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hetpeer.stages.data.sample_order import SampleOrder, ShardPiece, size_of
from hetpeer.stages.data.shards import TOKENS, Array, Arrays, ArraySpec, ShardFile, damaged, map_shard
from hetpeer.stages.data.token_shards import samples_in, windows

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
        return size_of(number, self.batch_size, self.microbatch_size)

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
