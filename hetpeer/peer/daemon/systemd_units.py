"""A volunteer or reliable peer as a systemd user service, started at login and again after a failure
(docs/daemon.md).
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from blake3 import blake3

from hetpeer.bootstrap.run.durable_files import atomic_write, disk_errors
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.process.confinement import VARIABLE as CONFINED

SYSTEMCTL_S = 60.0
IN_VAIN = (
    ExitCode.USAGE,
    ExitCode.CONFIG,
    ExitCode.NO_DEVICE,
    ExitCode.VERSION,
    ExitCode.RUN_CLOSED,
)
"""Exit codes after which a restart would fail the same way."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A service: its name, what it is, and how it runs."""

    name: str
    description: str
    command: str
    """Options after `hetpeer service install`."""
    nice: int
    again_s: int
    """Seconds until a restart."""
    writable: tuple[Path, ...] = ()
    """Folders that it may change."""
    own_temporary_files: bool = False
    """Whether its folder of temporary files is its own. A volunteer's is not: the screen's socket is there,
    which tells when the owner is idle."""


VOLUNTEER = Unit("hetpeer.service", "hetpeer volunteer", "--bootstrap ADDR", nice=10, again_s=30)


def serving(folder: Path) -> Unit:
    """Unit of `hetpeer bootstrap` in `folder`: others need it, so normal priority and a quick restart."""
    absolute = str(folder.absolute())
    readable = re.sub(r"[^A-Za-z0-9_.]+", "-", folder.absolute().name)[:64]
    name = f"hetpeer-bootstrap-{readable}-{blake3(absolute.encode()).hexdigest(4)}.service"
    described = absolute.replace("%", "%%").replace("\n", " ")
    return Unit(
        name,
        f"hetpeer bootstrap in {described}",
        "bootstrap DIR",
        nice=0,
        again_s=5,
        # a copy that is still to be fetched is made beside it
        writable=(folder.absolute() if folder.exists() else folder.absolute().parent,),
        own_temporary_files=True,
    )


_TEXT = """\
# Made by `hetpeer service install`, which writes it anew.
[Unit]
Description={description}

[Service]
Type=notify
ExecStart={command}
Restart=on-failure
RestartSec={again_s}
RestartPreventExitStatus={in_vain}
RestartForceExitStatus={later}
TimeoutStartSec=infinity
TimeoutStopSec=90
WatchdogSec=120
KillMode=mixed
Nice={nice}
Environment={confined}=yes

# Changes its own folders only. Needs user namespaces; without them systemd goes on without, and Landlock,
# which the daemon asks for itself, still holds (docs/daemon.md).
ProtectSystem=strict
{writable}PrivateTmp={private_tmp}
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
# Gains no privileges, and makes no namespaces. No PrivateDevices, ProtectClock or MemoryDenyWriteExecute:
# GPUs are devices, ProtectClock would hide them, and torch and CUDA write programs into memory.
NoNewPrivileges=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictRealtime=yes
LockPersonality=yes
# Netlink tells p2pd the machine's addresses. Landlock and seccomp are for the sandboxes inside, pidfd_getfd
# is for ending silent connections to p2pd.
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service landlock_create_ruleset landlock_add_rule landlock_restrict_self seccomp
SystemCallFilter=pidfd_getfd
SystemCallErrorNumber=EPERM
{environment}
[Install]
WantedBy=default.target
"""


FOLDERS = ("XDG_STATE_HOME", "XDG_CONFIG_HOME")
"""Variables that name folders of homes and settings: set in a shell, but not in a service."""


def unit_text(
    command: Sequence[str], unit: Unit = VOLUNTEER, environment: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Text of `unit`, which runs `command` with the FOLDERS of `environment` once the network is up. Pure."""
    folders = [f"{name}={environment[name]}" for name in FOLDERS if environment.get(name)]
    return _TEXT.format(
        command=" ".join(map(_quoted, command)),
        in_vain=" ".join(str(int(code)) for code in IN_VAIN),
        later=int(ExitCode.TRY_LATER),
        description=unit.description,
        again_s=unit.again_s,
        nice=unit.nice,
        confined=CONFINED,
        writable="".join(f"ReadWritePaths={_path(one)}\n" for one in unit.writable),
        private_tmp="yes" if unit.own_temporary_files else "no",
        environment="".join(f"Environment={_escaped(one)}\n" for one in folders),
    )


def writable(unit: Unit, folders: Sequence[Path]) -> Unit:
    """`unit`, which may also change `folders` and, if it shares them, temporary files."""
    shared = () if unit.own_temporary_files else (Path(tempfile.gettempdir()),)
    return replace(unit, writable=(*unit.writable, *folders, *shared))


def unit_path(unit: Unit = VOLUNTEER) -> Path:
    """Path of the unit among the user's own units."""
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "systemd" / "user" / unit.name


def install(command: Sequence[str], unit: Unit = VOLUNTEER) -> None:
    """Have `command` started now and at each login. Raises `LocalError` HP-SVC-001, HP-DISK-001."""
    path = unit_path(unit)
    _systemctl("daemon-reload")  # where there is no systemd nothing is left behind
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, unit_text(command, unit, os.environ).encode())
    _systemctl("daemon-reload")
    _systemctl("enable", unit.name)
    start(unit)


def start(unit: Unit = VOLUNTEER) -> None:
    """Start the unit, or restart it. Raises `LocalError` HP-SVC-001, HP-SVC-002."""
    _installed(unit)
    _systemctl("restart", "--no-block", unit.name)  # it is ready once the network is joined


def uninstall(unit: Unit = VOLUNTEER) -> None:
    """Stop the unit and disable it. Raises `LocalError` HP-SVC-001, HP-SVC-002."""
    _installed(unit)
    try:
        _systemctl("disable", "--now", unit.name)
    finally:
        unit_path(unit).unlink(missing_ok=True)
    _systemctl("daemon-reload")


def properties(unit: Unit = VOLUNTEER) -> Mapping[str, str]:
    """Properties of the service: ActiveState, SubState, UnitFileState, StatusText.

    Raises `LocalError` HP-SVC-001, HP-SVC-002.
    """
    _installed(unit)
    wanted = "ActiveState,SubState,UnitFileState,StatusText"
    lines = _systemctl("show", unit.name, "--property", wanted).splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def is_active(unit: Unit) -> bool:
    """Whether the unit is installed and runs. Raises as `properties`."""
    return unit_path(unit).exists() and properties(unit).get("ActiveState") in ("active", "activating")


def home() -> Path | None:
    """The home of the installed volunteer, as its unit says it; None where that says none."""
    found = re.search(r'"--home" "((?:[^"\\]|\\.)*)"', unit_path().read_text())
    return None if found is None else Path(_unquoted(found[1]))


def lingers() -> bool:
    """Whether the user's services run on when the user logs out."""
    try:
        said = subprocess.run(
            ["loginctl", "show-user", str(os.getuid()), "--property=Linger"],
            capture_output=True,
            text=True,
            check=False,
            timeout=SYSTEMCTL_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return said.stdout.strip() == "Linger=yes"


def _installed(unit: Unit) -> None:
    if not unit_path(unit).exists():
        raise LocalError(
            "HP-SVC-002",
            "the service is not installed",
            why=f"there is no {unit_path(unit)}",
            fix=f"hetpeer service install {unit.command}",
            exit_code=ExitCode.NOT_RUNNING,
        )


def _systemctl(*arguments: str) -> str:
    """Output of `systemctl --user`. Raises `LocalError` HP-SVC-001."""
    try:
        done = subprocess.run(
            ["systemctl", "--user", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=SYSTEMCTL_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_systemd(str(error)) from error
    if done.returncode:
        raise _no_systemd(done.stderr.strip() or f"systemctl ended with status {done.returncode}")
    return done.stdout


def _no_systemd(why: str) -> LocalError:
    return LocalError(
        "HP-SVC-001",
        "systemd refused the order",
        why=why,
        fix="log in as yourself, not with sudo or su; or run hetpeer without a service",
    )


def _quoted(word: str) -> str:
    """A word of a unit's command line, with nothing in it expanded."""
    return _escaped(word).replace("$", "$$")


def _escaped(word: str) -> str:
    """A quoted word of a unit."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return '"' + escaped.replace("\n", "\\n") + '"'


def _path(folder: Path) -> str:
    """A folder of a list of paths; one that does not exist is left out."""
    escaped = str(folder).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"-{escaped}"'


def _unquoted(word: str) -> str:
    """`text` with systemd's escapes, without quotes."""
    escaped = {"\\\\": "\\", '\\"': '"', "\\n": "\n", "%%": "%", "$$": "$"}
    return re.sub(r'\\\\|\\"|\\n|%%|\$\$', lambda found: escaped[found[0]], word)
