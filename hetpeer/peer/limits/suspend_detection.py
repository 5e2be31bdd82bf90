"""Detection of a suspended machine: the clock of running time against the one that runs on during a suspend.

Streams do not notice a suspend, because all their time-outs count running time (docs/daemon.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from hetpeer.dht.base.runtime import SystemClock

LOOK_S = 1.0
SLEPT_S = 10.0
"""Seconds after which other peers have given us up: a volunteer's lease."""

_log = logging.getLogger(__name__)


class Sleep:
    """Pure. Both clocks in seconds, as they were when it began."""

    def __init__(self, monotonic: float, boottime: float) -> None:
        self._ahead = boottime - monotonic

    def look(self, monotonic: float, boottime: float) -> float:
        """Seconds for which the machine has slept since the last look."""
        before, self._ahead = self._ahead, boottime - monotonic
        return max(0.0, self._ahead - before)


async def watch_forever(clock: SystemClock, woken: Callable[[], Awaitable[None]]) -> None:
    """Call `woken` after each sleep of SLEPT_S or more. Raises what that raises."""
    sleep = Sleep(clock.monotonic(), clock.boottime())
    while True:
        await asyncio.sleep(LOOK_S)
        slept_s = sleep.look(clock.monotonic(), clock.boottime())
        if slept_s >= SLEPT_S:
            _log.warning("this machine slept for %.0f s: joining again as a new volunteer", slept_s)
            await woken()
