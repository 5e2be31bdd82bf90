"""A block's sum as it arrives: its own pieces and those of tied parameters, each added where it lands.

So no piece of another block's sum is kept: of a tied table of 150 MB there is one sum, and not two. Two
numbers have the same sum in either order, so it does not matter which piece comes first. Of more uses of a
parameter the order counts, and their sums are kept apart (landed_sums.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class LandedVector:
    """The elements of `memory`, which are undefined at first.

    vector = LandedVector(np.empty(4, np.float32))
    vector.add(0, np.ones(3, np.float32))
    vector.add(2, np.ones(2, np.float32))  # 1, 1, 2, 1
    """

    def __init__(self, memory: Floats) -> None:
        self._memory = memory
        self._landed: list[tuple[int, int]] = []
        """Ranges [begin, end) that something has landed in, ascending; no two of them touch."""

    def add(self, begin: int, values: Floats) -> None:
        """Add `values` from element `begin` on; where nothing has landed yet, they are all there is."""
        at, end = begin, begin + len(values)
        for first, last in self._landed:
            if first < end and at < last:
                self._put(at, first, begin, values)
                low, high = max(at, first), min(last, end)
                with np.errstate(over="ignore", invalid="ignore"):  # the inspection sees what is not finite
                    self._memory[low:high] += values[low - begin : high - begin]
                at = high
        self._put(at, end, begin, values)
        self._note(begin, end)

    def _put(self, first: int, last: int, begin: int, values: Floats) -> None:
        if first < last:
            self._memory[first:last] = values[first - begin : last - begin]

    def _note(self, begin: int, end: int) -> None:
        apart = [one for one in self._landed if one[1] < begin or end < one[0]]
        touching = [one for one in self._landed if not (one[1] < begin or end < one[0])]
        joined = (min([begin, *(b for b, _ in touching)]), max([end, *(e for _, e in touching)]))
        self._landed = sorted([*apart, joined])
