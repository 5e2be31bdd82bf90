"""Samples with the smallest and the largest numbers of each integer array."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetpeer.stages.data.shards import Arrays

IGNORED = -100
"""Label that torch's cross entropy ignores: the next larger number is the smallest that means something."""


@dataclass(frozen=True, slots=True)
class Extreme:
    """A number of an array, and a sample that has it."""

    value: int
    sample: Arrays


class Extremes:
    """Collects, per integer array, the smallest and the largest number other than IGNORED."""

    def __init__(self) -> None:
        self._lowest: dict[str, Extreme] = {}
        self._highest: dict[str, Extreme] = {}

    def look(self, rows: Arrays) -> None:
        """Take samples into account: name → array [samples, …]."""
        for name, array in rows.items():
            if array.dtype.kind not in "iu":
                continue
            counted = array != IGNORED
            if not counted.any():
                continue
            limits = np.iinfo(array.dtype)
            lows, highs = np.where(counted, array, limits.max), np.where(counted, array, limits.min)
            low, high = (
                np.unravel_index(lows.argmin(), array.shape),
                np.unravel_index(highs.argmax(), array.shape),
            )
            if name not in self._lowest or array[low] < self._lowest[name].value:
                self._lowest[name] = _extreme(rows, int(array[low]), int(low[0]))
            if name not in self._highest or array[high] > self._highest[name].value:
                self._highest[name] = _extreme(rows, int(array[high]), int(high[0]))

    def found(self) -> dict[str, list[Extreme]]:
        """Array → its smallest and largest number."""
        return {name: [self._lowest[name], self._highest[name]] for name in self._lowest}


def _extreme(rows: Arrays, value: int, row: int) -> Extreme:
    return Extreme(value, {name: array[row].copy() for name, array in rows.items()})
