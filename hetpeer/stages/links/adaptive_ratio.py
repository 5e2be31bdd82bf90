"""Compression of a link: as little as keeps the pipeline fed. Pure (docs/links.md).

FusionLLM (arXiv 2410.12707, Eq. 7) compresses every link in proportion to its time, the slowest by the
author's ratio. Here all links aim at one time, `target` (bootstrap/state/work_shares.py), which is never
below the slowest stage's computation: precision is not given up unless it saves time. Compression begins with
halves, bytes and half bytes, before elements are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetpeer.stages.links.codec import Codec
from hetpeer.stages.links.value_codecs import VALUE_CODECS

LEAST_SHARE = 1e-4
"""Smallest share of elements that is kept."""
GENTLE = 4.0
"""Ratio of a warm-up's first step: bytes in place of float32, so that next to nothing is lost."""
SLACK = 0.5
"""Fraction of the target that a link may take if only rounding to bytes is needed.

A link as slow as the work would be hidden only if nothing ever varied: with 0.2 s of work and 100 ms of
delay, four stages then take 1.28 times the work of 64 microbatches, and 1.18 times at half. Rounding to bytes
costs next to nothing; anything coarser costs more tokens than that saves, and goes no further than the
target.
"""
FREE = 3.9
"""Ratio that rounding to bytes reaches."""
STEADY = 1.15
"""Factor by which a wanted ratio may change without a change of codec: rates are measured with noise."""


@dataclass(frozen=True, slots=True)
class AdaptiveRatio:
    """The encoding of one tensor; `share` of its elements are kept."""

    codec: Codec
    share: float = 1.0


def coding_for(limit: Codec, ratio: float, width: float = 4.0, rounded: float = 0.0) -> AdaptiveRatio:
    """The gentlest encoding within `limit`, the run's codec, that makes a tensor `ratio` times smaller.

    If `rounded` is more, it is reached too as far as rounding alone can; elements are left out only for
    `ratio`. `width`: bytes of an element in memory. For float32, halves give a ratio of 2, bytes 3.97, 4 bits
    7.5; higher ratios leave out elements. A ratio that `limit` cannot reach gets its smallest encoding.
    """
    wanted = max(ratio, rounded)
    dense = gentler(limit)
    if wanted <= 1.0 or not dense:
        return AdaptiveRatio(Codec())
    for codec in dense:
        if width / codec.cost(1.0) >= wanted:
            return AdaptiveRatio(codec)
    if not limit.sparse or width / dense[-1].cost(1.0) >= ratio:
        return AdaptiveRatio(dense[-1])
    return AdaptiveRatio(limit, share_for(limit, ratio, width))


def gentler(limit: Codec) -> tuple[Codec, ...]:
    """The dense codecs on the way to `limit`, including it if dense; the gentlest first."""
    if limit.values is None:
        return ()
    names = (*limit.values.gentler, limit.values.name)
    return tuple(Codec(VALUE_CODECS[name]) for name in names)


def steadied(
    before: Codec, limit: Codec, ratio: float, most: float, width: float = 4.0, rounded: float = 0.0
) -> AdaptiveRatio:
    """The encoding of `coding_for`, but in `before`, the link's last codec, if noise may explain the change.

    `before` stays while ratios up to STEADY times larger or smaller, none above `most`, would choose it.

    steadied(int8, int4, ratio=4.2, most=100.0)  # int8, as for 4.2 / STEADY
    """
    found = coding_for(limit, ratio, width, rounded)
    order = (Codec(), *gentler(limit), limit)
    first, last = (
        order.index(coding_for(limit, min(factor * ratio, most), width, min(factor * rounded, most)).codec)
        for factor in (1 / STEADY, STEADY)
    )
    if before == found.codec or not first <= order.index(before) <= last:
        return found
    return AdaptiveRatio(before, share_for(before, ratio, width) if before.sparse else 1.0)


def share_for(codec: Codec, ratio: float, width: float = 4.0) -> float:
    """The largest share of elements with which `codec` is `ratio` times smaller than `width` bytes each."""
    low, high = LEAST_SHARE, 1.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        if width / codec.cost(middle) >= ratio:
            low = middle
        else:
            high = middle
    return low


def warmed_up(most: float, batch: int, steps: int) -> float:
    """Largest ratio in batch `batch` (from 0), if it rises to `most` in the first `steps` batches.

    It rises by an equal factor with each of them, from GENTLE: gradients are largest, and the model has not
    got used to its cuts, at the beginning (Deep Gradient Compression, arXiv 1712.01887, section 3.3).

    warmed_up(100.0, 50, 100)  # 20.0
    """
    if batch >= steps or most <= GENTLE:
        return most
    return float(GENTLE * (most / GENTLE) ** (batch / steps))


def ratio_of(seconds: float, target: float, most: float) -> float:
    """Ratio for a link that takes `seconds` uncompressed, at least 1 and at most `most`."""
    return min(max(seconds / target, 1.0), most) if target > 0 else 1.0
