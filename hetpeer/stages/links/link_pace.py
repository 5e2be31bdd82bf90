"""The ratio of a link for its target time (bootstrap/state/link_costs.py). Pure."""

from __future__ import annotations

SLACK = 0.5
"""Fraction of the target that a link may take if only rounding is needed.

A link as slow as the work would be hidden only if nothing ever varied: with 0.2 s of work and 100 ms of
delay, four stages then take 1.28 times the work of 64 microbatches, and 1.18 times at half. Rounding for that
costs next to nothing; leaving out elements does, so it goes no further than the target.
"""


def ratio_of(seconds: float, target: float, most: float) -> float:
    """Ratio for a link that takes `seconds` uncompressed, at least 1 and at most `most`."""
    return min(max(seconds / target, 1.0), most) if target > 0 else 1.0
