"""A rate limit as a token bucket, kept as the time at which the direction is free again. Pure."""

from __future__ import annotations

import math

BURST_S = 0.1
"""Seconds of traffic that may go at once after a pause."""


class TokenBucket:
    """A limit in bytes/s for one direction; an infinite rate limits nothing.

    Times are seconds of one clock that never goes back. Example:

        bucket = TokenBucket(rate=1e6)
        bucket.spend(250_000, now=0.0)  # 0.0: it may go at once
        bucket.spend(1, now=0.0)  # 0.15: seconds to wait, less a burst of 0.1 s
    """

    def __init__(self, rate: float = math.inf) -> None:
        self._rate = rate
        self._free_at = -math.inf

    @property
    def rate(self) -> float:
        """Bytes/s."""
        return self._rate

    def change(self, rate: float, now: float) -> None:
        """Set another rate in bytes/s from now on; bytes that are owed stay owed."""
        owed = max(self._free_at - now, 0.0) * self._rate if math.isfinite(self._rate) else 0.0
        self._rate = rate
        self._free_at = now + owed / rate

    def spend(self, nbytes: int, now: float) -> float:
        """Count `nbytes`, in the order of asking. Returns the seconds to wait before they may go."""
        start = max(self._free_at, now - BURST_S)
        self._free_at = start + nbytes / self._rate
        return max(start - now, 0.0)
