"""One block's training state: flat vectors in the order of the block's layout (names and shapes), on which
optimizer and reduce work, and the digest of their bits.

state_file.py has the file for checkpoints and transfers. No torch here: daemon and coordinator check states
too.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from blake3 import blake3

from hetpeer.stages.graph.block_spec import BlockSpec

Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
"""A flat float32 vector: a block's parameters (or their optimizer state) in order, then statistics."""

Layout = Sequence[tuple[str, tuple[int, ...]]]
"""(name, shape) of a block's parameters and then of its statistics, in the order of its spec."""

FLOAT32 = np.dtype("<f4")
PIECE = 1 << 20
"""Elements of a vector that are looked at, hashed or copied at a time: 4 MiB."""


class Numbers(Protocol):
    """A flat float32 vector, wherever it lies, read in pieces."""

    @property
    def count(self) -> int:
        """Number of its elements."""

    def read(self, begin: int, end: int) -> Vector:
        """Elements [begin, end). Raises OSError, and what the vector's kind says."""


class State(Protocol):
    """One block's state, wherever its vectors lie."""

    @property
    def version(self) -> int:
        """Number of updates in it."""

    @property
    def averages(self) -> int:
        """Number of averagings among them."""

    def numbers(self) -> Mapping[str, Numbers]:
        """The parameters as "", and the optimizer's vectors by name; absent ones are zero."""


class Whole:
    """A vector in memory, read without a copy."""

    def __init__(self, vector: Vector) -> None:
        self._vector = np.ascontiguousarray(vector, dtype=FLOAT32)
        self.count = len(self._vector)

    def read(self, begin: int, end: int) -> Vector:
        """Elements [begin, end)."""
        return self._vector[begin:end]


class Joined:
    """Vectors one after the other, as one."""

    def __init__(self, parts: Sequence[Numbers]) -> None:
        self._parts = parts
        self._firsts = list(itertools.accumulate((part.count for part in parts), initial=0))
        self.count = self._firsts[-1]

    def read(self, begin: int, end: int) -> Vector:
        """Elements [begin, end), copied if they are in several parts. Raises what the parts raise."""
        at, part = begin, bisect.bisect_right(self._firsts, begin) - 1
        if begin < end <= self._firsts[part + 1]:
            return self._parts[part].read(begin - self._firsts[part], end - self._firsts[part])
        values = np.empty(end - begin, dtype=FLOAT32)
        while at < end:
            first, stop = self._firsts[part], min(self._firsts[part + 1], end)
            values[at - begin : stop - begin] = self._parts[part].read(at - first, stop - first)
            at, part = stop, part + 1
        return values


def pieces_of(numbers: Numbers) -> Iterator[tuple[int, Vector]]:
    """(begin, elements) of each piece of `numbers`, in order."""
    for begin in range(0, numbers.count, PIECE):
        yield begin, numbers.read(begin, min(begin + PIECE, numbers.count))


def in_memory(numbers: Numbers) -> Vector:
    """A copy of all of them. Raises what reading them raises."""
    vector = np.empty(numbers.count, dtype=np.float32)
    for begin, piece in pieces_of(numbers):
        vector[begin : begin + len(piece)] = piece
    return vector


def without_zeros(vectors: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """The parameters (""), and the other vectors that are not zero, by name in order.

    The first elements decide nearly always, without reading all of a vector.
    """
    names = [name for name in sorted(vectors) if name and not _is_zero(vectors[name])]
    return {name: vectors[name] for name in ("", *names)}


def _is_zero(numbers: Numbers) -> bool:
    first = numbers.read(0, min(1024, numbers.count))
    return not first.any() and not any(piece.any() for _, piece in pieces_of(numbers))


def digest_of(vectors: Mapping[str, Numbers], version: int, averages: int) -> str:
    """Blake3 (64 hex digits) of `without_zeros`, each its name and little-endian float32 ‖ version as u64.

    ‖ averages as u64, if there were any.
    """
    hasher = blake3()
    for name, numbers in without_zeros(vectors).items():
        hasher.update(name.encode())
        for _, piece in pieces_of(numbers):
            hasher.update(piece.data.cast("B"))
    for number in (version, *([averages] if averages else [])):
        hasher.update(number.to_bytes(8, "little"))
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """One block at `version`. Each update is a version, and in a grouped run each averaging: `averages` of
    them.

        state = BlockState(version=40, parameters=vector, optimizer={"exp_avg": moments})
    """

    version: int
    parameters: Vector
    optimizer: Mapping[str, Vector] = field(default_factory=dict)
    """Optimizer state by torch's names (`exp_avg`), each as long as `parameters`; absent vectors are zero.

    At version 0 there is none, whatever the rules begin with.
    """
    averages: int = 0

    def vectors(self) -> dict[str, Vector]:
        """The parameters as "", and the optimizer's vectors that are not zero, by name in order."""
        named = {"": self.parameters, **self.optimizer}
        return {name: named[name] for name in without_zeros(self.numbers())}

    def numbers(self) -> dict[str, Numbers]:
        """The parameters as "", and the optimizer's vectors by name."""
        kept = {name: Whole(vector) for name, vector in self.optimizer.items()}
        return {"": Whole(self.parameters), **kept}

    def digest(self) -> str:
        """The digest of its bits (`digest_of`)."""
        return digest_of(self.numbers(), self.version, self.averages)


def layout_of(spec: BlockSpec) -> Layout:
    """The layout of a block's state."""
    return [
        (name, tensor.sizes)
        for specs in (spec.parameter_specs, spec.statistic_specs)
        for name, tensor in specs.items()
    ]


def element_count(layout: Layout) -> int:
    """Number of float32 values in one vector of a block."""
    return sum(math.prod(shape) for _, shape in layout)


def split(
    vector: Vector, layout: Layout
) -> Iterator[tuple[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]]:
    """(name, its part of the flat vector as a view in its shape), for each tensor of the layout."""
    begin = 0
    for name, shape in layout:
        end = begin + math.prod(shape)
        yield name, vector[begin:end].reshape(shape)
        begin = end
