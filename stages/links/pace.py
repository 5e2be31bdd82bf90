"""What links aim at, and how fast they are. Pure: times are given."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

STEADY = 4.0
"""Seconds of receiving over which a line's rate is averaged."""
SURE_BYTES = 1 << 16
"""A rate from fewer bytes than this is none: they may have waited in a buffer."""


def target_seconds(links: Iterable[float], computing: Iterable[float], most: float) -> float:
    """The time that every link is to take for a microbatch; 0 where nothing is known.

    `links` are the times of the pipeline's links when nothing is compressed (R_e), `computing` those that stages take
    for a microbatch, `most` the author's ratio: the slowest link is not shrunk further, and none further than it is.
    """
    slowest = max(links, default=0.0)
    return max(slowest / most, max(computing, default=0.0)) if slowest else 0.0


def ratio_of(seconds: float, target: float, most: float) -> float:
    """How many times smaller a link should be that takes `seconds` when nothing is compressed."""
    return min(max(seconds / target, 1.0), most) if target > 0 else 1.0


@dataclass(slots=True)
class Meter:
    """The rate at which bytes arrive over a line while any are due, in bytes/s. Times are seconds of any one clock.

    The receiver measures: neither the distance nor what the sender does in between counts, and streams of one line
    that share it are one.
    """

    _receiving: int = 0
    _since: float = 0.0
    _bytes: float = 0.0
    _seconds: float = field(default=0.0)

    def begun(self, now: float) -> None:
        """A payload begins to arrive."""
        if not self._receiving:
            self._since = now
        self._receiving += 1

    def ended(self, now: float, nbytes: int) -> None:
        """It has arrived, or `nbytes` of it before it broke off."""
        self._receiving -= 1
        passed, self._since = now - self._since, now
        fade = math.exp(-passed / STEADY)
        self._bytes = self._bytes * fade + nbytes
        self._seconds = self._seconds * fade + passed

    @property
    def rate(self) -> float:
        """0 where too little has arrived to tell."""
        return self._bytes / self._seconds if self._seconds > 0 and self._bytes >= SURE_BYTES else 0.0
