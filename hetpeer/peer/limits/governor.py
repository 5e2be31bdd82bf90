"""Rules that hold a volunteer back: sensor readings and settings in, reasons out (docs/limits.md). Pure.

A rule holds at once and releases slowly, so that nothing flaps. `Holds` has all reasons, also the owner's
(docs/daemon.md); `Pacer` keeps a GPU's power limit; `explained` says why a volunteer is held and when it
resumes. Times are in seconds of a clock that runs on while the machine sleeps.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetpeer.peer.limits.amounts import duration, hours, volume, within
from hetpeer.peer.limits.settings import Settings

if TYPE_CHECKING:
    from hetpeer.dht.base.errors import HetpeerError
    from hetpeer.peer.limits.nvml import GpuState

LEAST_SHARE = 0.1
"""Least share; a volunteer that works less is of no use to a swarm, and is held back instead."""
POWER_AIM = 0.97
"""Margin as a share of the limit: readings are some seconds old."""
SHARE_FALL, SHARE_RISE = 0.5, 1.1
"""Least and largest factor of the share from one look to the next."""
HELPLESS_S = 30.0
"""Seconds of too much power at the least share before throttling counts as useless: another program uses the
card, or the limit is below its idle power.
"""
MAINS_S = 30.0
COOL_S = 30.0
COOLER_C = 8.0
GAME_SHARE = 0.1
GAME_OVER_S = 60.0
POWER_OVER_S = 60.0


class Reason(enum.StrEnum):
    """Reason to hold a volunteer back, in the order in which several are told."""

    USER = "user"
    BATTERY = "battery"
    IDLE = "idle"
    SCHEDULE = "schedule"
    TEMPERATURE = "temperature"
    POWER = "power"
    GAME = "game"
    TRANSFER_CAP = "transfer_cap"
    SETTINGS = "settings"
    """A new worker takes the place of one with other limits."""


class Holds:
    """The reasons that there are. A volunteer works when there is none."""

    def __init__(self) -> None:
        self._until: dict[Reason, float] = {}

    def hold(self, reason: Reason, until: float = math.inf) -> None:
        """Hold for `reason` until then; replaces an earlier time for it."""
        self._until[reason] = until

    def release(self, reason: Reason) -> None:
        """Release the hold for `reason`, if there is one."""
        self._until.pop(reason, None)

    def at(self, now: float) -> tuple[Reason, ...]:
        """Reasons that hold at `now`, in order."""
        return tuple(reason for reason in Reason if self._until.get(reason, -math.inf) > now)

    def until(self, now: float) -> float:
        """Time at which the last reason ends by itself: `now` without one, infinity if never."""
        return max((self._until[reason] for reason in self.at(now)), default=now)


class Pacer:
    """Adjusts `share`, from LEAST to 1, at each look, some seconds apart."""

    share = 1.0
    _helpless_since = math.inf

    def look(self, now: float, watts: float | None, limit: float, *, held: bool) -> bool:
        """Adjust the share; returns whether throttling does not help.

        `watts`: mean of the card that draws most; None: unknown, nothing changes. `limit` 0: no limit.
        `held`: the volunteer is held for power, so the watts are not its own.
        """
        if not limit:
            self.share, self._helpless_since = 1.0, math.inf
            return False
        if watts is not None:
            wanted = self.share * POWER_AIM * limit / max(watts, 1.0)
            highest = self.share if held else min(1.0, self.share * SHARE_RISE)
            self.share = max(LEAST_SHARE, self.share * SHARE_FALL, min(wanted, highest))
            over = self.share == LEAST_SHARE and watts > limit
            self._helpless_since = min(self._helpless_since, now) if over else math.inf
        return now - self._helpless_since >= HELPLESS_S


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
    """Whether the hold may be released, once this has been true for `steady_s`."""
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
    """Findings of the rules that are on. An unknown reading neither holds nor releases earlier."""
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


def paused(reasons: Sequence[Reason], settings: Settings) -> str:
    """`paused (battery): …`, one sentence for each reason."""
    return f"paused ({','.join(reasons)}): {explained(reasons, settings)}"


def explained(reasons: Sequence[Reason], settings: Settings) -> str:
    """One sentence for each reason."""
    return "; ".join(SENTENCES[reason](settings) for reason in reasons)


def _temperature(settings: Settings) -> str:
    limits = settings.limits
    told = {"temperature_c": limits.temperature_c, "cpu_temperature_c": limits.cpu_temperature_c}
    allowed = " or ".join(f"limits.{key} = {celsius}" for key, celsius in told.items() if celsius)
    return f"too hot for {allowed}: it resumes after {COOL_S:.0f} s at {COOLER_C:.0f} °C less"


SENTENCES: Mapping[Reason, Callable[[Settings], str]] = {
    Reason.USER: lambda _: "you asked for it; hetpeer resume ends the pause",
    Reason.BATTERY: lambda _: (
        f"the machine runs on its battery: it resumes after {MAINS_S:.0f} s of mains power,"
        " or at once with when.on_battery = run"
    ),
    Reason.IDLE: lambda settings: (
        f"somebody uses the machine, or that is not known: it resumes after {settings.when.idle_after} "
        "without a key"
        " press (when.idle_after), or at once with when.mode = always"
    ),
    Reason.SCHEDULE: lambda settings: (
        f"it is outside {', '.join(settings.when.hours)}: it resumes then (when.hours),"
        " or at once with when.mode = always"
    ),
    Reason.TEMPERATURE: _temperature,
    Reason.POWER: lambda settings: (
        f"resting does not keep the GPU at limits.gpu_power_w = {settings.limits.gpu_power_w}:"
        f" it resumes after {POWER_OVER_S:.0f} s at that or less"
    ),
    Reason.GAME: lambda _: (
        f"another program uses {GAME_SHARE:.0%} of a GPU or more: it resumes after {GAME_OVER_S:.0f} s with"
        " less, or at once with when.yield_to_games = false"
    ),
    Reason.TRANSFER_CAP: lambda settings: (
        f"the {settings.limits.transfer_cap} of this month are used up: it resumes next month,"
        " or with a higher limits.transfer_cap"
    ),
    Reason.SETTINGS: lambda _: "a new compute worker starts with the new settings; it resumes by itself",
}
"""Reason → its sentence, given the settings in force."""
