"""Whether a link takes what it is given. Pure.

A link that does not is said to be congested from some distance on: forwards whose next hop is that peer, with so many hops
or more behind it, are not begun until it is relieved. Nearer ones are, or what is waited for could itself be waiting.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetpeer.dht.credit import Pool

GRADIENTS, SHARDS, ACTIVATIONS = range(3)
"""Pools of credit; an activation's is ACTIVATIONS and the number of hops behind the one that it goes to (links.md)."""

CONGESTED_S, RELIEVED_S = 2.0, 1.0
"""Seconds that the line takes for what is under way: above the first it is congested, until it is below the second."""
LEAST_FRAMES = 3
"""So many frames have to be under way: one that is long on a slow line is no congestion."""
CONGESTED_BYTES = 8 << 20
"""Stands for the seconds while the line's rate is not known."""


class Pressure:
    """One link."""

    def __init__(self) -> None:
        self.held: int | None = None
        """Hops behind the peer from which on forwards are held back; None: none are."""

    def judge(self, waiting: Iterable[Pool], frames: int, nbytes: int, rate: float) -> bool:
        """Whether `held` has changed. `waiting`: pools without credit; `frames`, `nbytes`: under way; `rate`: bytes/s or 0."""
        seconds = nbytes / rate if rate else CONGESTED_S * nbytes / CONGESTED_BYTES
        slow = self.held == 0 and seconds > RELIEVED_S
        slow = frames >= LEAST_FRAMES and (slow or seconds > CONGESTED_S)
        short = min((pool - ACTIVATIONS for pool in waiting if pool >= ACTIVATIONS), default=None)
        before, self.held = self.held, 0 if slow else short
        return self.held != before
