"""The only place that reads the machine's clocks. The simulator passes a clock of its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks in seconds: `monotonic` for durations, `wall` (since 1970) for the expiry of records."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""

    def wall(self) -> float:
        """Seconds since 1970."""


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        """Seconds since boot, without the time in which the machine was suspended."""
        return time.monotonic()

    def boottime(self) -> float:
        """Seconds since boot, including the time in which the machine was suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        """Seconds since 1970."""
        return time.time()
