"""Sensors of the machine: battery, idle time, temperatures, other programs on the GPUs.

`Sensors` blocks and never raises: an unknown value is None. Each program gets ASK_S; a driver, a kernel file
or an X server may hang longer, and `SensorPoll` never waits for one that does.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import psutil

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.runtime import aside
from hetpeer.peer.limits.governor import Readings
from hetpeer.peer.limits.nvml import GpuWatch, gpus
from hetpeer.peer.limits.settings import WORKER, Settings

SUPPLIES = Path("/sys/class/power_supply")
ASK_S = 2.0
MUTTER = (
    *("busctl", "--user", "call", "org.gnome.Mutter.IdleMonitor", "/org/gnome/Mutter/IdleMonitor/Core"),
    *("org.gnome.Mutter.IdleMonitor", "GetIdletime"),
)
LOGIND = ("busctl", "call", "org.freedesktop.login1", "/org/freedesktop/login1")
_PROPERTIES = ("org.freedesktop.DBus.Properties", "Get", "ss", "org.freedesktop.login1.Manager")
PROCESSOR = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
"""Names of chips whose temperatures are the processor's."""
TIMEOUT_S = 5.0
"""Seconds to wait: longer than all programs together, each of which has its own limit (sensors.py)."""

_log = logging.getLogger(__name__)


class _Info(ctypes.Structure):
    """XScreenSaverInfo of X11/extensions/scrnsaver.h."""

    _fields_ = (
        ("window", ctypes.c_ulong),
        ("state", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("til_or_since", ctypes.c_ulong),
        ("idle", ctypes.c_ulong),
        ("event_mask", ctypes.c_ulong),
    )


_OnError = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_OnExit = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
# A server that goes away while it is asked would have Xlib end the process. As long as the process lives it
# may call these.
_on_error = _OnError(lambda _display: 0)
_on_exit = _OnExit(lambda _display, _data: None)


def x_idle_s() -> float | None:
    """Seconds since the last input at the X server of `DISPLAY`; None without one, or if it is Wayland's."""
    if not os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return None  # XWayland sees what its own windows get, and no more
    try:
        x11, xss = ctypes.CDLL("libX11.so.6"), ctypes.CDLL("libXss.so.1")
    except OSError:
        return None
    x11.XOpenDisplay.restype = ctypes.c_void_p
    x11.XDefaultRootWindow.restype = ctypes.c_ulong
    x11.XDefaultRootWindow.argtypes = x11.XCloseDisplay.argtypes = (ctypes.c_void_p,)
    if not hasattr(x11, "XSetIOErrorExitHandler"):
        return None  # before 1.7 nothing keeps it from ending the process
    x11.XSetIOErrorExitHandler.argtypes = (ctypes.c_void_p, _OnExit, ctypes.c_void_p)
    xss.XScreenSaverQueryInfo.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.POINTER(_Info))
    display = x11.XOpenDisplay(None)
    if not display:
        return None
    x11.XSetIOErrorHandler(_on_error)
    x11.XSetIOErrorExitHandler(display, _on_exit, None)
    try:
        info = _Info()
        known = xss.XScreenSaverQueryInfo(display, x11.XDefaultRootWindow(display), ctypes.byref(info))
        return info.idle / 1000 if known else None
    finally:
        x11.XCloseDisplay(display)


class Sensors:
    """Reads what the settings ask for, and nothing else."""

    def __init__(self) -> None:
        self._gpus = GpuWatch()
        self._used: tuple[str, tuple[str, ...]] | None = None
        """(`compute.device`, UUIDs of its GPUs); none on the processor."""
        self._unused: LocalError | None = None
        """Reason why torch computes on no GPU although there is one; else None."""
        self._asked_unused = False
        self._told: set[str] = set()
        """Codes of what was said."""

    def computes_on(self, asked: str, uuids: tuple[str, ...]) -> None:
        """Workers that were started for the devices `asked` compute on the GPUs with these UUIDs."""
        self._used = asked, uuids

    def read(self, settings: Settings) -> Readings:
        """Current readings. Takes some milliseconds; seconds if something hangs."""
        limits, when = settings.limits, settings.when
        uuids = self._gpus_of(settings.compute.device)
        self._gpus.heed(uuids)
        idle, now = idle_s() if when.mode == "idle" else None, time.monotonic()
        unseen = idle_unknown() if when.mode == "idle" and idle is None else None
        unused = self._unused if uuids == () and not only_cpu(settings.compute.device) else None
        warnings = tuple(error for error in (unseen, unused) if error is not None)
        for error in warnings:
            if error.code not in self._told:
                self._told.add(error.code)
                _log.warning("%s", error)
        return Readings(
            minute=minute_of_day(),
            on_battery=on_battery() if when.on_battery == "pause" else None,
            idle_s=idle,
            gpu_c=self._gpus.hottest() if limits.temperature_c else None,
            gpu_w=self._gpus.drawn(now) if limits.gpu_power_w else None,
            cpu_c=cpu_celsius() if limits.cpu_temperature_c else None,
            foreign_gpu=self._gpus.foreign_share(_is_ours) if when.yield_to_games else None,
            gpus=self._gpus.states(now),
            warnings=warnings,
        )

    def _gpus_of(self, asked: str) -> tuple[str, ...] | None:
        """UUIDs of the GPUs for the devices `asked`; None: no worker has reported them yet."""
        if only_cpu(asked):
            return ()
        if self._used is None or self._used[0] != asked:
            return None
        if not self._used[1] and not self._asked_unused:
            self._asked_unused = True
            self._unused = gpus().unused(metadata.version("torch"))
        return self._used[1]


def only_cpu(asked: str) -> bool:
    """Whether the devices `asked` are the processor alone."""
    return set(asked.split(",")) == {"cpu"}


def minute_of_day() -> int:
    """Minute of the local day, 0…1439."""
    local = time.localtime()
    return local.tm_hour * 60 + local.tm_min


def on_battery(supplies: Path = SUPPLIES) -> bool | None:
    """Whether the machine runs on its battery; None without one. A mouse's battery does not count."""
    mains, batteries = list[bool](), list[str]()
    try:
        for supply in sorted(supplies.iterdir()):
            kind, scope = _line(supply / "type"), _line(supply / "scope")
            if kind in ("Mains", "USB") and (online := _line(supply / "online")):
                mains.append(online != "0")
            elif kind == "Battery" and scope != "Device":
                batteries.append(_line(supply / "status"))
    except OSError:
        return None
    if not batteries:
        return None
    if any(mains):
        return False
    return "Discharging" in batteries or (bool(mains) and "Charging" not in batteries)


def idle_s() -> float | None:
    """Seconds since somebody used the machine; None if unknown.

    The desktop is asked first: some do not tell logind, which then takes the user for busy.
    """
    known = [seconds for seconds in (_mutter_idle_s(), x_idle_s()) if seconds is not None]
    return min(known) if known else _logind_idle_s()


def idle_told() -> dict[str, float]:
    """Source of the idle time → its seconds."""
    asked = {"GNOME over D-Bus": _mutter_idle_s, "X11": x_idle_s, "logind": _logind_idle_s}
    said = {who: ask() for who, ask in asked.items()}
    return {who: seconds for who, seconds in said.items() if seconds is not None}


def idle_unknown() -> LocalError:
    """HP-SYS-007."""
    return LocalError(
        "HP-SYS-007",
        "it is not known whether anybody uses this machine",
        why="neither GNOME (D-Bus), nor X11, nor logind reports it",
        fix="hetpeer config set when.mode always, or schedule with when.hours; in mode idle it stays paused",
        exit_code=ExitCode.CONFIG,
    )


def cpu_celsius() -> float | None:
    """The hottest sensor of the processor."""
    try:
        chips = psutil.sensors_temperatures()
    except (AttributeError, OSError):
        return None
    found = [sensor.current for name in PROCESSOR for sensor in chips.get(name, ())]
    return max(found, default=None)


def _mutter_idle_s() -> float | None:
    found = re.fullmatch(r"t (\d+)", _said(MUTTER))
    return int(found[1]) / 1000 if found else None


def _logind_idle_s() -> float | None:
    """Seconds since all sessions are idle, by logind; 0 if one is not, None without a session."""
    if (hint := _logind("IdleHint")) == "v b false":
        return 0.0
    since = re.fullmatch(r"v t (\d+)", _logind("IdleSinceHint")) if hint == "v b true" else None
    return max(time.time() - int(since[1]) / 1e6, 0.0) if since and int(since[1]) else None


def _logind(name: str) -> str:
    return _said((*LOGIND, *_PROPERTIES, name))


def _said(command: Sequence[str]) -> str:
    """Output of a program; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _is_ours(pid: int) -> bool:
    """Whether the process is no reason to yield: a volunteer's worker of any daemon here, or a process that
    is invisible.

    In a container the driver gives the host's pids, so our own cannot be told from others.
    """
    try:
        return WORKER in psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


class SensorPoll:
    """Readings of `sensors`, one at a time: a hanging sensor blocks one thread, not more and more of them."""

    def __init__(self, sensors: Sensors) -> None:
        self._sensors = sensors
        self._under_way: asyncio.Future[Readings] | None = None
        self._last: Readings | None = None
        self._silent = False

    async def look(self, settings: Settings, month_bytes: float) -> Readings:
        """Readings within TIMEOUT_S; if a sensor hangs, the last ones, with `month_bytes` and the minute."""
        asked = self._under_way or aside(partial(self._sensors.read, settings), name="sensors")
        self._under_way = asked
        await asyncio.wait([asked], timeout=0.0 if self._silent else TIMEOUT_S)
        if asked.done():
            self._under_way, self._last = None, asked.result()
            if self._silent:
                _log.warning("the sensors answer again")
            self._silent = False
        elif not self._silent:
            self._silent = True
            _log.warning("the sensors have not answered for %.0f s: their last values are used", TIMEOUT_S)
        minute = minute_of_day()
        return replace(self._last or Readings(minute=minute), minute=minute, month_bytes=month_bytes)
