"""How far a link shrinks what it sends: as little as keeps the pipeline fed. Pure (docs/links.md).

FusionLLM (arXiv 2410.12707, Eq. 7) shrinks every link in proportion to its time, the slowest by the author's ratio. Here
all links aim at one time, `target` (link_pace.py), which is never below the slowest stage's computation: precision that buys no time is
not given up. And what a ratio costs is not always elements: halves, bytes and half bytes come first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetpeer.stages.links.codec import Codec, Values

LEAST_SHARE = 1e-4


@dataclass(frozen=True, slots=True)
class AdaptiveRatio:
    """What one tensor is to be written with; `share` of its elements are kept."""

    codec: Codec
    share: float = 1.0


def coding_for(limit: Codec, ratio: float, width: float = 4.0, rounded: float = 0.0) -> AdaptiveRatio:
    """The gentlest way to be `ratio` times smaller than in memory that `limit`, the codec of the run, allows.

    `rounded` times, if that is more, where rounding alone does it, or as far as that goes: elements are left out for `ratio` only.
    `width`: bytes of an element in memory. Halves do for a ratio of 2 of float32, bytes for 3.97, 4 bits for 7.5, fewer
    elements for more. A ratio that `limit` cannot reach gets all that it can.
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
    """The dense codecs on the way to `limit`, it included if it is one; the gentlest first."""
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
