"""The limits of a running volunteer: settings that may change, sensor readings, and the month's traffic.

The governor decides what follows from the readings; this module applies it as holds of the daemon, rate
limits of the node and cores of the processes (docs/limits.md).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

from hetpeer.dht.base.errors import HetpeerError, LocalError
from hetpeer.dht.base.runtime import SystemClock, TaskSet, to_its_end
from hetpeer.dht.base.trouble_line import TroubleLine
from hetpeer.peer.control.control_messages import ControlRequest, DaemonStatus
from hetpeer.peer.daemon.owner_wishes import VolunteerDaemon, Wish
from hetpeer.peer.limits import config_file
from hetpeer.peer.limits.amounts import volume
from hetpeer.peer.limits.governor import Governor, Readings, Reason
from hetpeer.peer.limits.node_rates import NodeRates
from hetpeer.peer.limits.sensors import SensorPoll, Sensors
from hetpeer.peer.limits.setting_layers import changed
from hetpeer.peer.limits.settings import Settings
from hetpeer.peer.process.home import Home
from hetpeer.peer.process.lifecycle import restrict_cores

LOOK_S = 2.0
SAVE_EVERY = 5
"""Looks between two writings of the month's bytes."""
RENEWAL_S = 0.5
"""Seconds for which a volunteer is held so that its worker is replaced: one life ends, and the next begins.
"""
DEVICE, KEPT = "compute.device", "the worker before"
"""A setting of which only a worker's start shows whether it can be, and its source where it could not."""

_log = logging.getLogger(__name__)


class LimitsInForce(NodeRates):
    """Answers the owner from the start, applies limits within `running`; the node is given later (`use`)."""

    def __init__(
        self,
        settings: Settings,
        daemon: VolunteerDaemon,
        home: Home,
        sensors: Sensors,
        sources: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(settings, sources)
        self.readings: Readings | None = None
        """Readings of the last look."""
        self._daemon = daemon
        self._home = home.path
        self._sensors = sensors
        self._lookout = SensorPoll(sensors)
        self._clock = SystemClock()
        self._governor = Governor()
        self._holding: frozenset[Reason] = frozenset()
        self._counted = 0, 0
        self._device: str | None = None
        """The last `compute.device` that a worker was started on."""
        self._month = self._saved = config_file.Month(month=_month())
        self._unsaved = TroubleLine(_log, "this month's traffic is saved again")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Limits in force, before a worker is started; the month's bytes are written down at the end.

        Only who has the home's lock may do so: the file is ours.
        """
        self._month = self._saved = config_file.load_month(self._home, _month())
        if self.settings.limits.cpu:
            restrict_cores(self.settings.limits.cpu)
        await self.look()
        tasks = TaskSet()
        tasks.spawn(self._look_forever(), name="limits")
        try:
            yield
        finally:
            await tasks.close()
            self.count()
            self.save()

    def computes_on(self, asked: str, uuids: tuple[str, ...]) -> None:
        """Watch the GPUs with these UUIDs, on which the workers for the devices `asked` compute."""
        self._device = asked
        self._sensors.computes_on(asked, uuids)

    def keep_device(self) -> bool:
        """Go back to the last device on which a worker started. False if there is none, or it is in force."""
        wanted = self.settings.compute.device
        if self._device in (None, wanted):
            return False
        _log.warning("no worker starts on compute.device %r: back to %r", wanted, self._device)
        self.settings = changed(self.settings, DEVICE, self._device, "the owner")
        self.sources[DEVICE] = KEPT
        return True

    def answer(self, request: ControlRequest) -> DaemonStatus:
        """Do what the owner asks for. Raises `LocalError` HP-CONF-003 for a setting that cannot be."""
        if request.key is not None and request.value is not None:
            self.change(request.key, request.value)
        told = {"month_bytes": self.month_bytes, "settings": self.told}
        return self._daemon.answer(request).model_copy(update=told)

    @property
    def month_bytes(self) -> int:
        """Up and down, in this month, until now."""
        self.count()
        return self._month.nbytes

    @property
    def warnings(self) -> tuple[HetpeerError, ...]:
        """Problems that the sensors have found."""
        return self.readings.warnings if self.readings is not None else ()

    @property
    def holding(self) -> tuple[Reason, ...]:
        """Reasons that hold the volunteer back now, in order."""
        return self._daemon.holding

    def change(self, key: str, value: str) -> None:
        """Change a setting, with a new worker if it needs one. Raises `LocalError` HP-CONF-003."""
        before = self.settings
        super().change(key, value)
        if self.settings.limits.cpu != before.limits.cpu:
            restrict_cores(self.settings.limits.cpu)
        if self.settings.needs_new_worker(before) and self._daemon.wish is Wish.WORK:
            self._daemon.hold(Reason.SETTINGS, RENEWAL_S)

    async def look(self) -> None:
        """Count, read the sensors, and have the daemon held for what follows."""
        settings = self.settings
        time.tzset()  # the machine may be in another time zone by now
        readings = await self._lookout.look(settings, self.month_bytes)
        self.readings = readings
        found = self._governor.look(self._clock.boottime(), readings, settings)
        for reason in found - self._holding:
            _log.info("held back: %s", reason)
            self._daemon.hold(reason)
        for reason in self._holding - found:
            self._daemon.release(reason)
        self._holding = found

    def count(self) -> None:
        """Add the node's traffic since the last call to the month's."""
        sent, received = self._throttle.up.nbytes, self._throttle.down.nbytes
        self._month = self._month.plus(_month(), sent - self._counted[0], received - self._counted[1])
        self._counted = sent, received

    @property
    def share(self) -> float:
        """Share of its time that the worker may work under its GPU's power limit."""
        return self._governor.share

    @property
    def capped(self) -> bool:
        """Whether nothing is to be sent any more in this month."""
        return Reason.TRANSFER_CAP in self._holding

    @property
    def metered(self) -> bool:
        """Whether the owner counts the line's bytes: then none are given to others for probes."""
        return math.isfinite(volume(self.settings.limits.transfer_cap))

    def save(self) -> None:
        """Save the month's traffic if it has changed. A disk that cannot be written is only logged."""
        month = self._month
        if month == self._saved:
            return
        try:
            config_file.save_month(self._home, month)
            self._saved = month
            self._unsaved.ended()
        except LocalError as error:
            self._unsaved.lasts(error, f"this month's traffic could not be saved: {error}")

    async def _look_forever(self) -> None:
        while True:
            for _ in range(SAVE_EVERY):
                await asyncio.sleep(LOOK_S)
                await self.look()
            await to_its_end(self.save)


def _month() -> str:
    return time.strftime("%Y-%m")
