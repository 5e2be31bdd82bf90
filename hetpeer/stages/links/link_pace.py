"""How far a link is shrunk for what it aims at (bootstrap/state/link_costs.py). Pure."""

from __future__ import annotations

SLACK = 0.5
"""What a link may take of the target if only rounding is needed for it. As slow as the work a link would be hidden only if nothing
ever varied: with a fifth of a second of work and 100 ms of way, four stages take 1.28 of the work of 64 microbatches then, and 1.18
at half. Rounding costs next to nothing for that; leaving elements out does not, so that is done no further than to the target.
"""


def ratio_of(seconds: float, target: float, most: float) -> float:
    """How many times smaller a link should be that takes `seconds` when nothing is compressed."""
    return min(max(seconds / target, 1.0), most) if target > 0 else 1.0
