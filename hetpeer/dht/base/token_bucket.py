"""A rate that holds: a token bucket, as the time at which its line is free again. Pure."""

from __future__ import annotations

import math

BURST_S = 0.1
"""A line that was idle is behind by so much at most: what may go at once is what goes in that time."""


class TokenBucket:
    """Bytes/s of one direction; infinite: nothing waits. Times are seconds of one clock that never goes back."""

    def __init__(self, rate: float = math.inf) -> None:
        self._rate = rate
        self._free_at = -math.inf

    @property
    def rate(self) -> float:
        return self._rate

    def change(self, rate: float, now: float) -> None:
        """Another rate from now on; what is owed is owed in bytes."""
        owed = max(self._free_at - now, 0.0) * self._rate if math.isfinite(self._rate) else 0.0
        self._rate = rate
        self._free_at = now + owed / rate

    def spend(self, nbytes: int, now: float) -> float:
        """`nbytes` go, in the order of asking; returns the seconds to wait before they may."""
        start = max(self._free_at, now - BURST_S)
        self._free_at = start + nbytes / self._rate
        return max(start - now, 0.0)
