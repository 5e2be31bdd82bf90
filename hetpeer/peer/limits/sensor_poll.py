"""Repeated readings of the sensors that never wait for one that hangs: a driver, a kernel file, an X
server.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial

from hetpeer.dht.base.runtime import aside
from hetpeer.peer.limits.governor import Readings
from hetpeer.peer.limits.sensors import Sensors, minute_of_day
from hetpeer.peer.limits.settings import Settings

PATIENCE_S = 5.0
"""Seconds to wait: longer than all programs together, each of which has its own limit (sensors.py)."""

_log = logging.getLogger(__name__)


class SensorPoll:
    """Readings of `sensors`. Only one is in progress at a time, so a hanging sensor costs one thread, not
    ever more.
    """

    def __init__(self, sensors: Sensors) -> None:
        self._sensors = sensors
        self._under_way: asyncio.Future[Readings] | None = None
        self._last: Readings | None = None
        self._silent = False

    async def look(self, settings: Settings, month_bytes: float) -> Readings:
        """Readings within PATIENCE_S; if a sensor hangs, the last ones with the present minute and
        `month_bytes`.
        """
        asked = self._under_way or aside(partial(self._sensors.read, settings), name="sensors")
        self._under_way = asked
        await asyncio.wait([asked], timeout=0.0 if self._silent else PATIENCE_S)
        if asked.done():
            self._under_way, self._last = None, asked.result()
            if self._silent:
                _log.warning("the sensors answer again")
            self._silent = False
        elif not self._silent:
            self._silent = True
            _log.warning("the sensors have not answered for %.0f s: their last values are used", PATIENCE_S)
        minute = minute_of_day()
        return replace(self._last or Readings(minute=minute), minute=minute, month_bytes=month_bytes)
