"""The learning rate over a run, as knots: linear between two knots, constant outside. Pure.

Linear pieces are a few IEEE operations, with equal bits on every machine. The C library's cosine differs
between machines in its last bit, and holders compare digests of their states, so the run's author turns a
cosine into linear pieces once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

Knots = Sequence[tuple[float, float]]
"""(update number from 1, by what it multiplies the learning rate), with rising numbers; at least one."""
PIECES = 400
"""Linear pieces of a cosine; the error is at most 2e-5."""


def factor(knots: Knots, step: int) -> float:
    """The factor of the learning rate in update number `step`."""
    after = bisect_right(knots, float(step), key=lambda knot: knot[0])
    if after in (0, len(knots)):
        return knots[max(after - 1, 0)][1]
    (begin, low), (end, high) = knots[after - 1 : after + 1]
    return low + (high - low) * ((step - begin) / (end - begin))


def knots_of(shape: str, steps: int, warmup: int, final: float) -> tuple[tuple[int, float], ...]:
    """Knots of a schedule: linear warm-up to 1 in `warmup` updates, then `shape` down to `final` at update
    `steps`.

    `shape`: constant, linear or cosine.
    """
    rise = [(1, 1 / warmup)] if warmup > 1 else []
    top = max(warmup, 1)
    fall = steps - top
    if shape == "constant" or fall <= 0:
        return (*rise, (top, 1.0))
    pieces = 1 if shape == "linear" else min(PIECES, fall)
    ends = [fall * piece // pieces for piece in range(1, pieces + 1)]
    shares = [
        1 - end / fall if shape == "linear" else (1 + math.cos(math.pi * end / fall)) / 2 for end in ends
    ]
    falling = [(top + end, final + (1 - final) * share) for end, share in zip(ends, shares, strict=True)]
    return (*rise, (top, 1.0), *falling)
