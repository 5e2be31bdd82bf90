"""Checks that start nothing: of software, memory, disk, limits, clock, home, identity, daemon and service.

The owner's settings are checked as well: whether they are valid, and whether this machine can keep them
(ports, idle time, battery).
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hetpeer.bootstrap.run.durable_files import probe_room
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.p2pd.p2pd_process import check_port_free
from hetpeer.peer.checkup import thresholds
from hetpeer.peer.checkup.thresholds import Verdict
from hetpeer.peer.control.control_client import ask
from hetpeer.peer.control.control_messages import ControlRequest, DaemonStatus, SettingInForce
from hetpeer.peer.daemon import systemd_units
from hetpeer.peer.daemon.machine_offer import OwnersLimits, main_memory
from hetpeer.peer.limits.config_file import effective
from hetpeer.peer.limits.node_rates import told
from hetpeer.peer.limits.sensors import idle_told, on_battery
from hetpeer.peer.limits.settings import Settings
from hetpeer.peer.process.home import Home
from hetpeer.peer.process.lifecycle import open_many
from hetpeer.stages.block import device
from hetpeer.stages.ipc.arena import no_shared_memory
from hetpeer.stages.ipc.worker_messages import WorkerInfo

PACKAGES = ("hetpeer", "torch", "hivemind")
PROBE_BYTES = 1 << 20
_TIMEX_BYTES = 208
"""Size of the kernel's struct timex on 64-bit Linux; all zeros only read the clock (adjtimex(2))."""
_NOT_SYNCHRONISED = 5


def software() -> Verdict:
    """Versions of Python, the system and the packages. Raises `LocalError` HP-SYS-001."""
    found = {name: version_of(name) for name in PACKAGES}
    return thresholds.software(sys.version_info[:3], f"{platform.system()} {platform.machine()}", found)


def version_of(package: str) -> str:
    """Installed version; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def memory() -> Verdict:
    """Free memory. Raises `LocalError` HP-MEM-003."""
    machine = device.survey()
    return thresholds.memory(machine.ram_free_bytes, machine.ram_bytes, machine.cores)


def shared_memory() -> Verdict:
    """Whether daemon and compute worker can share memory. Raises `LocalError` HP-SYS-004."""
    try:
        descriptor = os.memfd_create("hetpeer-doctor")
        try:
            os.truncate(descriptor, PROBE_BYTES)
            os.pwrite(descriptor, bytes(PROBE_BYTES), 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise no_shared_memory(error) from error
    return "daemon and compute worker can share memory"


def open_files() -> Verdict:
    """Limit of open files that a daemon gets, which raises its own. Raises `LocalError` HP-SYS-002."""
    open_many()
    return thresholds.open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def clock() -> Verdict:
    """Whether the kernel says that the clock is synchronised; peers measure its error (examination.py)."""
    asked = ctypes.create_string_buffer(_TIMEX_BYTES)
    state = ctypes.CDLL(None).adjtimex(asked)
    return thresholds.clock(None if state < 0 else state != _NOT_SYNCHRONISED)


def folder(home: Path) -> Verdict:
    """Whether the home or nearest existing folder is writable with room. Raises `LocalError` HP-DISK-*."""
    there = nearest(home)
    probe_room(there, PROBE_BYTES)
    return thresholds.disk(shutil.disk_usage(there).free, str(home))


def nearest(home: Path) -> Path:
    """`home`, or the nearest folder above it that exists."""
    return next(path for path in (home.absolute(), *home.absolute().parents) if os.path.lexists(path))


def identity(home: Path) -> Verdict:
    """Identity of the home, if it has one. Raises `LocalError` HP-ID-001."""
    key = Home(home).key
    if not os.path.lexists(key):
        return "none yet; hetpeer join makes one"
    return f"{Identity.load(key).peer_id}, readable by you alone"


def daemon(home: Path) -> Verdict:
    """The daemon that runs from this home. Raises `LocalError` HP-CTL-002, HP-CTL-003."""
    try:
        standing = ask(home, ControlRequest(do="status"))
    except LocalError as error:
        if error.code != "HP-CTL-001":
            raise
        return "no volunteer runs from this home"
    return f"a volunteer runs from this home: {standing.state}" + (
        f" ({standing.reason})" if standing.reason else ""
    )


def service() -> Verdict:
    """Whether systemd starts a volunteer, and keeps it when its user logs out."""
    if not systemd_units.unit_path().exists():
        return "not installed: a volunteer ends with the session that started it"
    if systemd_units.lingers():
        return "installed; it keeps running when you log out"
    return LocalError(
        "HP-SVC-003",
        "the service stops when you log out",
        why="systemd ends a user's services with the last session, unless lingering is on",
        fix="loginctl enable-linger",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Settings of one home. `wrong`: the error in them; the defaults stand in then."""

    settings: Mapping[str, SettingInForce]
    standing: DaemonStatus | None
    """Status of the volunteer that runs from there."""
    wrong: LocalError | None = None

    @classmethod
    def of(cls, home: Path) -> Owner:
        """The settings of the volunteer that runs, or of the next one without options. Never raises."""
        try:
            standing = ask(home, ControlRequest(do="status"))
        except LocalError:  # the check of the daemon says why
            standing = None
        if standing is not None and standing.settings:
            return cls(settings=standing.settings, standing=standing)
        try:
            found = effective(home, {})
        except LocalError as error:
            return cls(settings=told(Settings(), {}), standing=standing, wrong=error)
        return cls(settings=told(found.settings, found.sources), standing=standing)

    def value(self, key: str) -> str:
        """Value of the setting `section.key`."""
        return self.settings[key].value

    @property
    def port(self) -> int:
        """Port at which a volunteer that is started now would listen; 0: any free one."""
        return 0 if self.standing is not None else int(self.value("network.port"))


def settings(owner: Owner) -> Verdict:
    """Settings of the volunteer. Raises `LocalError` HP-CONF-003."""
    if owner.wrong is not None:
        raise owner.wrong
    return thresholds.settings(owner.settings, running=owner.standing is not None)


def place(owner: Owner, home: Path, infos: Sequence[WorkerInfo]) -> Verdict:
    """Memory that a place may take here with workers like `infos`, and the largest place.

    Raises `LocalError` HP-MEM-004.
    """
    limits = OwnersLimits.by(owner.value)
    main, disk = main_memory(limits.ram_bytes(), infos), limits.disk_bytes(nearest(home))
    return thresholds.place(main, limits.offered(infos, main, disk))


def port(owner: Owner) -> Verdict:
    """Whether a volunteer can listen at its ports. Raises `LocalError` HP-NET-001."""
    if owner.standing is None:
        for key in thresholds.PORTS:
            check_port_free(owner.value("network.host"), int(owner.value(key)))
    addresses = None if owner.standing is None else owner.standing.addresses
    return thresholds.port(owner.settings, addresses)


def idle(owner: Owner) -> Verdict:
    """Whether the user's idle time is known. Takes some seconds if a program hangs. Raises HP-SYS-007."""
    return thresholds.idle(idle_told(), owner.value("when.mode"))


def battery(owner: Owner) -> Verdict:
    """Whether the machine runs on its battery, and what then happens. Never raises."""
    return thresholds.battery(on_battery(), owner.value("when.on_battery"))
