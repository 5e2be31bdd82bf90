"""Random bits that every device draws alike: a pure function of their place in the run.

Philox4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011) with key (run seed,
stream) and counter (step, microbatch, operator). numpy draws on a CPU; philox.py draws the same bits on other
devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

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
    key = np.array([draw.seed, DROPOUT_STREAM], dtype=np.uint64)
    philox = np.random.Philox(key=key, counter=np.array(draw.counter(operator), dtype=np.uint64))
    bits = philox.random_raw(-(-count // 4)).astype("<u8", copy=False).view("<u2")[:count]
    kept: np.ndarray[tuple[int], np.dtype[np.bool_]] = bits >= threshold(probability)
    return kept
