"""Lengths of the differences that rounding makes in a microbatch's numbers, as a checker has measured them.

Two honest processors round differently. Relative to a gradient that has almost vanished this is as much as
the gradient itself, so a comparison of two computations needs to know it (docs/trust.md, "One spot check").
"""

from __future__ import annotations

from typing import Final, NamedTuple

ROOM: Final = 16.0
"""Ratio of two differences that are both due to rounding: of 1,000 pairs few are that far apart."""
UNIT: Final = 2.0**-24
"""Largest relative error of one float32 operation: no difference is taken for smaller than this."""


class Rounding(NamedTuple):
    """2-norms of differences, at a place of consecutive blocks; all zero if nothing was measured."""

    output: float = 0.0
    """The bundle that leaves the last block."""
    gradient: float = 0.0
    """The gradient of the bundle that entered the first block."""
    sums: tuple[float, ...] = ()
    """Each block's gradient, from the first block on."""
    relative: float = 0.0
    """The largest of these relative to the numbers' own length."""


UNMEASURED: Final = Rounding()
