"""Compression of a link: as little as keeps the pipeline fed. Pure (docs/links.md).

FusionLLM (arXiv 2410.12707, Eq. 7) compresses every link in proportion to its time, the slowest by the
author's ratio. Here all links aim at one time, `target` (link_pace.py), which is never below the slowest
stage's computation: precision is not given up unless it saves time. Compression begins with halves, bytes and
half bytes, before elements are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetpeer.stages.links.codec import Codec, Values

LEAST_SHARE = 1e-4


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
    halves = Values.FP16 if limit.values is Values.FP16 else Values.BF16
    ways = (halves, Values.INT8, Values.INT4)
    return tuple(Codec(values) for values in ways[: ways.index(limit.values) + 1])


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
