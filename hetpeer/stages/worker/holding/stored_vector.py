"""A block's vectors, wherever they lie: on the device, in main memory or in the scratch file.

An update or a sum goes through them in pieces, so that no more than a piece of what lies in the file is ever
in memory, and a piece of a large vector stays in the processor's cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from hetpeer.stages.block.block_state import Numbers, Vector
from hetpeer.stages.worker.holding.scratch_file import ScratchFile, read, write

PIECE = 1 << 20
"""Numbers of a piece: 4 MiB."""
ITEM_BYTES = 4


def pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The ranges of at most PIECE numbers that make up [begin, end), in order."""
    for first in range(begin, end, PIECE):
        yield first, min(first + PIECE, end)


class StoredVector(ABC):
    """A flat float32 vector of `count` numbers.

    for begin, end in pieces(0, vector.count):
        piece = vector.piece(begin, end)
        piece.mul_(2.0)
        vector.keep(begin, piece)
    """

    count: int

    @abstractmethod
    def piece(self, begin: int, end: int) -> Tensor:
        """The numbers [begin, end): the memory itself, or a copy of what lies in the file.

        Raises `LocalError` HP-DISK-008.
        """

    @abstractmethod
    def keep(self, begin: int, piece: Tensor) -> None:
        """Store a changed `piece` that begins at number `begin`. Raises as `piece`."""

    @abstractmethod
    def write(self, begin: int, values: Tensor) -> None:
        """Store `values` from number `begin` on, whatever was there. Raises as `piece`."""

    def read(self, begin: int, end: int) -> Vector:
        """The numbers [begin, end) in main memory, as those of a state. Raises as `piece`."""
        return self.piece(begin, end).cpu().numpy()

    @abstractmethod
    def free(self) -> None:
        """Give back what the vector takes. It must not be used afterwards."""

    def fill(self, source: Numbers) -> None:
        """Copy `source`, of the same length. Raises as `piece`, and as reading the source does."""
        for begin, end in pieces(0, self.count):
            self.write(begin, torch.from_numpy(source.read(begin, end)))

    def whole(self) -> Tensor:
        """All of it, as `piece` gives it."""
        return self.piece(0, self.count)


class InMemory(StoredVector):
    """The 1-D float32 `tensor` itself, on any device."""

    def __init__(self, tensor: Tensor) -> None:
        self.count = len(tensor)
        self._tensor = tensor

    def piece(self, begin: int, end: int) -> Tensor:
        return self._tensor[begin:end]

    def keep(self, begin: int, piece: Tensor) -> None:
        pass  # it was changed where it lies

    def write(self, begin: int, values: Tensor) -> None:
        self._tensor[begin : begin + len(values)].copy_(values)

    def free(self) -> None:
        pass  # memory is freed with the last reference


class InFile(StoredVector):
    """A vector in the scratch file; its content is undefined at first. Raises `LocalError` HP-DISK-007."""

    def __init__(self, file: ScratchFile, count: int) -> None:
        self.count = count
        self._file = file
        self._part = file.take(count * ITEM_BYTES)

    def piece(self, begin: int, end: int) -> Tensor:
        found = torch.empty(end - begin)
        read(self._part, begin * ITEM_BYTES, _bytes_of(found))
        return found

    def keep(self, begin: int, piece: Tensor) -> None:
        self.write(begin, piece)

    def write(self, begin: int, values: Tensor) -> None:
        write(self._part, begin * ITEM_BYTES, _bytes_of(values.cpu().contiguous()))

    def free(self) -> None:
        self._file.give(self._part)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.numpy().data.cast("B")
