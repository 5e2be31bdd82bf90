"""Whether a link is congested. Pure.

Forwards whose next hop is behind a congested link, with so many blocks or more left to the loss, are not
begun until it is relieved. Nearer ones are begun, or tensors that are waited for could themselves wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetpeer.dht.streams.flow_control import Pool

GRADIENTS, SHARDS, ACTIVATIONS = range(3)
"""Pools of grants; activations have one per block left to the loss (`pool_at`)."""

CONGESTED_S, RELIEVED_S = 2.0, 1.0
"""Seconds that the line needs for what is under way: congested above the first, relieved below the second."""
LEAST_FRAMES = 3
"""Frames that must be under way: one that is long on a slow line is no congestion."""
CONGESTED_BYTES = 8 << 20
"""Stands for the seconds while the line's rate is not known."""


def pool_at(blocks_left: int) -> Pool:
    """The pool of an activation with `blocks_left` > 0 to the loss (docs/links.md: what may wait for
    what).
    """
    return ACTIVATIONS + blocks_left - 1


class Pressure:
    """The state of one link."""

    def __init__(self) -> None:
        self.held: int | None = None
        """Blocks left to the loss from which on forwards are held back; None: none are."""

    def judge(self, waiting: Iterable[Pool], frames: int, nbytes: int, rate: float) -> bool:
        """Judge the link; returns whether `held` has changed.

        `waiting`: pools without a grant; `frames`, `nbytes`: under way; `rate`: bytes/s or 0.
        """
        seconds = nbytes / rate if rate else CONGESTED_S * nbytes / CONGESTED_BYTES
        slow = self.held == 0 and seconds > RELIEVED_S
        slow = frames >= LEAST_FRAMES and (slow or seconds > CONGESTED_S)
        short = min((pool - pool_at(0) for pool in waiting if pool >= ACTIVATIONS), default=None)
        before, self.held = self.held, 0 if slow else short
        return self.held != before
