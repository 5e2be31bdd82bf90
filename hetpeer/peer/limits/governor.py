"""Rules that hold a volunteer back: sensor readings and settings in, reasons out (docs/limits.md).

Pure. A rule holds at once and releases slowly, so that nothing flaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetpeer.peer.limits.amounts import duration, hours, volume, within
from hetpeer.peer.limits.holds import Reason
from hetpeer.peer.limits.power_pacer import Pacer
from hetpeer.peer.limits.settings import Settings

if TYPE_CHECKING:
    from hetpeer.dht.base.errors import HetpeerError
    from hetpeer.peer.limits.nvml import GpuState

MAINS_S = 30.0
COOL_S = 30.0
COOLER_C = 8.0
GAME_SHARE = 0.1
GAME_OVER_S = 60.0
POWER_OVER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Sensor readings; None: unknown."""

    minute: int
    """Minute of the local day, 0…1439."""
    on_battery: bool | None = None
    idle_s: float | None = None
    gpu_c: float | None = None
    cpu_c: float | None = None
    gpu_w: float | None = None
    """Average watts since the last look, of the GPU in use, as is `gpu_c`."""
    foreign_gpu: float | None = None
    """Share of that GPU that other programs use; of any GPU, where the processor computes."""
    month_bytes: float = 0.0
    gpus: tuple[GpuState, ...] = ()
    """The GPU that is computed on, or those that may be it: for people."""
    warnings: tuple[HetpeerError, ...] = ()
    """Problems of the sensors, or found by them."""


@dataclass(frozen=True, slots=True)
class _Finding:
    """Present finding of one rule."""

    holds: bool
    clear: bool
    """Whether it may be released, after `steady_s` of that."""
    steady_s: float = 0.0


class Governor:
    """Reasons that hold, kept from one look to the next."""

    def __init__(self) -> None:
        self._pacer = Pacer()
        self._clear_since: dict[Reason, float] = {}
        """Reason that holds → time since when it has been clear without a break; infinite: it is not clear.
        """

    @property
    def share(self) -> float:
        """Share of its time that the worker may work."""
        return self._pacer.share

    def look(self, now: float, readings: Readings, settings: Settings) -> frozenset[Reason]:
        """The reasons that hold now; `now` in seconds of a clock that never goes back."""
        findings = _findings(readings, settings)
        self._pace(now, readings.gpu_w, settings.limits.gpu_power_w, findings)
        for reason in self._clear_since.keys() - findings.keys():  # switched off
            del self._clear_since[reason]
        for reason, finding in findings.items():
            if finding.holds:
                self._clear_since[reason] = math.inf
            elif reason in self._clear_since:
                since = min(self._clear_since[reason], now) if finding.clear else math.inf
                self._clear_since[reason] = since
                if finding.clear and now - since >= finding.steady_s:
                    del self._clear_since[reason]
        return frozenset(self._clear_since)

    def _pace(self, now: float, watts: float | None, limit: int, findings: dict[Reason, _Finding]) -> None:
        """Throttle a GPU over its power limit; hold the volunteer if throttling is not enough."""
        helpless = self._pacer.look(now, watts, limit, held=Reason.POWER in self._clear_since)
        if limit:
            clear = watts is not None and watts <= limit
            findings[Reason.POWER] = _Finding(helpless, clear, POWER_OVER_S)


def _findings(readings: Readings, settings: Settings) -> dict[Reason, _Finding]:
    """Findings of the rules that are on. An unknown reading does not hold, but does not release earlier
    either.
    """
    limits, when = settings.limits, settings.when
    found: dict[Reason, _Finding] = {}

    def find(reason: Reason, holds: bool, steady_s: float = 0.0) -> None:
        found[reason] = _Finding(holds, not holds, steady_s)

    if when.on_battery == "pause":
        find(Reason.BATTERY, bool(readings.on_battery), MAINS_S)
    if when.mode == "idle":
        find(Reason.IDLE, readings.idle_s is None or readings.idle_s < duration(when.idle_after))
    if when.mode == "schedule":
        find(Reason.SCHEDULE, not any(within(hours(text), readings.minute) for text in when.hours))
    if when.yield_to_games:
        find(Reason.GAME, (readings.foreign_gpu or 0.0) >= GAME_SHARE, GAME_OVER_S)
    find(Reason.TRANSFER_CAP, readings.month_bytes >= volume(limits.transfer_cap))
    pairs = ((readings.gpu_c, limits.temperature_c), (readings.cpu_c, limits.cpu_temperature_c))
    if any(limit for _, limit in pairs):
        over = max((c - limit for c, limit in pairs if c is not None and limit), default=-math.inf)
        found[Reason.TEMPERATURE] = _Finding(over >= 0, over <= -COOLER_C, COOL_S)
    return found
