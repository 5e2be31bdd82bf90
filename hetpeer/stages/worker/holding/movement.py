"""The movement of a block's parameters since the last averaging, as clusters send it."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from hetpeer.stages.links.sparse_movement import WINDOW, TopK2
from hetpeer.stages.worker.holding.stored_vector import pieces
from hetpeer.stages.worker.tensor_staging import CommandError

CODEC: Final = TopK2()


class Movement:
    """The movement at `version`, encoded: a 234th of the bytes of the parameters.

    `ranges` make up the parameters, in order; each is encoded by itself, so the copies of a tied parameter
    stay equal. `moved(begin, end)` gives elements of it as float32. A piece of a vector (`pieces`) is whole
    windows, so the bytes do not depend on how a range is cut. Raises `LocalError` HP-NUM-002 if it is not
    finite.

        movement = Movement(3, ((0, 10_000),), moved)
        movement.written(4096, 10_000)  # 140 bytes: two windows
    """

    def __init__(
        self, version: int, ranges: Sequence[tuple[int, int]], moved: Callable[[int, int], Tensor]
    ) -> None:
        self.version = version
        self.pieces = [piece for one in ranges for piece in pieces(*one)]
        """The parameters in pieces, each of one range."""
        self._data = {first: bytearray(CODEC.nbytes(last - first)) for first, last in ranges}
        self._ranges = ranges
        for begin, end in self.pieces:
            CODEC.encode(moved(begin, end), self.written(begin, end))

    def written(self, begin: int, end: int) -> memoryview:
        """Elements [begin, end) as they are sent. Raises CommandError if they are not of whole windows."""
        place = bisect.bisect(self._ranges, begin, key=lambda one: one[0]) - 1
        first, last = self._ranges[place]
        if not first <= begin <= end <= last or (begin - first) % WINDOW:
            raise CommandError(f"the movement of [{begin}, {end}) is not of whole windows")
        return memoryview(self._data[first])[CODEC.nbytes(begin - first) : CODEC.nbytes(end - first)]

    def read(self, begin: int, end: int) -> Tensor:
        """Elements [begin, end) as all receivers read them, on the CPU. Raises CommandError as `written`."""
        return CODEC.decode(self.written(begin, end), end - begin)

    def whole(self) -> Tensor:
        """All elements, as `read`."""
        return torch.cat([self.read(*one) for one in self._ranges])
