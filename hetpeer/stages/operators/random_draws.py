"""Random bits that every device draws alike: a pure function of their place in the run.

Philox4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011) with key (run seed,
stream) and counter (step, microbatch, operator). numpy draws on a CPU; philox.py draws the same bits on other
devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

Word = Annotated[int, Field(ge=0, lt=1 << 64, strict=True)]
"""A number that Philox counts by."""
DROPOUT_STREAM = 3
"""Second half of the key; microbatches.py uses 1 and 2."""
LEVELS = 1 << 16
"""Sixteen bits decide about one element."""


@dataclass(frozen=True, slots=True)
class Draw:
    """All that a task's random numbers depend on: the run's seed, the step, and which of `microbatches`."""

    seed: Word
    step: Word
    microbatch: Word
    microbatches: Word

    def counter(self, operator: int) -> tuple[int, int, int, int]:
        """Philox's counter, low word first; the low word counts blocks of 256 bits."""
        return 0, self.step, self.microbatch, operator


def threshold(probability: float) -> int:
    """Sixteen random bits below this number drop an element: `probability`, rounded to 1/65536."""
    return round(probability * LEVELS)


def keep_mask(
    draw: Draw, operator: int, probability: float, count: int
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Mask of the `count` elements that dropout number `operator` of the author's program keeps."""
    bits = _raw(draw, operator, -(-count // 4)).view("<u2")[:count]
    kept: np.ndarray[tuple[int], np.dtype[np.bool_]] = bits >= threshold(probability)
    return kept


Floats = np.ndarray[tuple[int], np.dtype[np.float32]]


def uniform(draw: Draw, operator: int, count: int) -> Floats:
    """`count` numbers in [0, 1), multiples of 2^-24: draw number `operator` of the author's program."""
    drawn: Floats = ((_words(draw, operator, count) >> 8) * 2.0**-24).astype(np.float32)
    return drawn


def exponential(draw: Draw, operator: int, count: int) -> Floats:
    """`count` numbers of the exponential distribution with mean 1, above 0."""
    drawn: Floats = (-np.log((_words(draw, operator, count) + 0.5) * 2.0**-32)).astype(np.float32)
    return drawn


def normal(draw: Draw, operator: int, count: int) -> Floats:
    """`count` numbers of the standard normal distribution, by Box and Muller's formula in float64."""
    first, second = (_words(draw, operator, 2 * count).reshape(2, count) + 0.5) * 2.0**-32
    drawn: Floats = (np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second)).astype(np.float32)
    return drawn


def _words(draw: Draw, operator: int, count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """`count` numbers of 32 random bits."""
    return _raw(draw, operator, -(-count // 2)).view("<u4")[:count]


def _raw(draw: Draw, operator: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """`count` words of 64 random bits."""
    key = np.array([draw.seed, DROPOUT_STREAM], dtype=np.uint64)
    philox = np.random.Philox(key=key, counter=np.array(draw.counter(operator), dtype=np.uint64))
    return philox.random_raw(count).astype("<u8", copy=False)
