"""The only place that reads the machine's clocks; the simulator passes its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from two clocks: durations are judged by `monotonic`, only record expiry by `wall`."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def boottime(self) -> float:
        """As `monotonic`, which stands still while the machine is suspended; this one goes on."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()
