"""Even division of things in a row: blocks to stages, operators to blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.graph.block_spec import BlockSpec

Range = tuple[int, int]
"""Positions [begin, end)."""


def balanced_ranges(
    blocks: Sequence[BlockSpec], stages: int, weights: Sequence[float] | None = None
) -> list[tuple[int, int]]:
    """Contiguous block ranges [begin, end), one for each stage, that make the slowest stage as fast as
    possible.

    A stage's time is its blocks' forward and backward FLOPs over its `weight` (relative speed, 1 by default).
    Among equals the sum of squares is least, so that a bottleneck elsewhere does not leave a stage idle.
    Exact, by dynamic programming. Raises LocalError HP-MODEL-005 if there are fewer blocks than stages.
    """
    if not 1 <= stages <= len(blocks):
        raise too_few(f"{len(blocks)} blocks cannot be shared out to {stages} stages")
    if weights is not None and len(weights) != stages:
        raise ValueError(f"{len(weights)} weights for {stages} stages")
    return even_ranges([3 * block.flops_forward for block in blocks], weights or [1.0] * stages)


def too_few(what: str) -> LocalError:
    """HP-MODEL-005."""
    why = "each stage holds at least one block, and each block one operator"
    fix = "ask for at least one stage and one block, and no more stages than blocks"
    return LocalError("HP-MODEL-005", what, why=why, fix=fix, exit_code=ExitCode.CONFIG)


def even_ranges(costs: Sequence[int], weights: Sequence[float]) -> list[Range]:
    """Split `costs` into len(weights) non-empty ranges: least maximum of cost / weight, then least sum of
    squares.

    There are at least as many costs as weights. Takes O(stages · costs²) time and O(stages · costs) memory.
    """
    sums = np.array([0, *itertools.accumulate(costs)], dtype=np.float64)
    positions = range(len(sums))
    # between[begin, end]: the cost of that range, infinite if it is empty.
    between = np.where(np.less.outer(positions, positions), sums[np.newaxis] - sums[:, np.newaxis], np.inf)

    def best(limit: float) -> tuple[float, list[Range]]:
        # score[end]: the best way to give costs[:end] to the stages so far. Without a limit "best" is the
        # least maximum, with one the least sum of squares below it.
        score = np.where(np.arange(len(sums)) == 0, 0.0, np.inf)
        chosen = []
        for weight in weights:
            times = between / weight
            if math.isinf(limit):
                totals = np.maximum(score[:, np.newaxis], times)
            else:
                totals = score[:, np.newaxis] + np.where(times <= limit, times * times, np.inf)
            chosen.append(totals.argmin(axis=0))
            score = totals.min(axis=0)
        ranges: list[Range] = []
        end = len(costs)
        for begin_of in reversed(chosen):
            begin = int(begin_of[end])
            ranges.insert(0, (begin, end))
            end = begin
        return float(score[-1]), ranges

    slowest, _ = best(math.inf)
    return best(slowest)[1]
