"""A timer for the moment that the coordinator's core names, which may change with every event."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from hetpeer.dht.base.runtime import Clock


class Alarm:
    """Calls `ring` in the event loop at the time that `set` was given last, by `clock`.

    It rings within some milliseconds of that time, so that a wait window of 20 ms is not one of 200.
    """

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: float) -> None:
        """Ring at `at`, and at no time named before. It does not ring for a time that is past or infinite."""
        if at == self._at:
            return
        self.stop()
        wait = at - self._clock.monotonic()
        if 0 < wait < math.inf:
            self._at, self._timer = at, asyncio.get_running_loop().call_later(wait, self._rings)

    def stop(self) -> None:
        """Ring no more."""
        self._at = math.inf
        if self._timer is not None:
            self._timer.cancel()

    def _rings(self) -> None:
        self._at, self._timer = math.inf, None  # a loop's timer may be early: then the same time is set again
        self._ring()
