"""A volunteer, or a reliable peer, as a service of its user's systemd: it is started at login, and again when it fails (docs/daemon.md)."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from blake3 import blake3

from hetpeer.bootstrap.run.durable_files import atomic_write, disk_errors
from hetpeer.dht.base.errors import ExitCode, LocalError

SYSTEMCTL_S = 60.0
IN_VAIN = (
    ExitCode.USAGE,
    ExitCode.CONFIG,
    ExitCode.NO_DEVICE,
    ExitCode.VERSION,
    ExitCode.RUN_CLOSED,
)
"""Who ended with one of these would do so again."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A service: its name, what it is, and how it runs."""

    name: str
    description: str
    command: str
    """With which it is installed, behind `hetpeer service install`."""
    nice: int
    again_s: int
    """After so many seconds it is started again."""


VOLUNTEER = Unit("hetpeer.service", "hetpeer volunteer", "--bootstrap ADDR", nice=10, again_s=30)


def serving(folder: Path) -> Unit:
    """Of the reliable peer, or rendezvous, that lives in `folder`: others wait for it, so it does not give way to other programs, and is back soon."""
    absolute = str(folder.absolute())
    readable = re.sub(r"[^A-Za-z0-9_.]+", "-", folder.absolute().name)[:64]
    name = f"hetpeer-bootstrap-{readable}-{blake3(absolute.encode()).hexdigest(4)}.service"
    described = absolute.replace("%", "%%").replace("\n", " ")
    return Unit(name, f"hetpeer bootstrap in {described}", "bootstrap DIR", nice=0, again_s=5)


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
{environment}
[Install]
WantedBy=default.target
"""


FOLDERS = ("XDG_STATE_HOME", "XDG_CONFIG_HOME")
"""Where a home and its settings are looked for, which a shell may know and a service not."""


def unit_text(
    command: Sequence[str], unit: Unit = VOLUNTEER, environment: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The text of `unit`, which runs `command` with FOLDERS as `environment` has them; it waits for the network as long as it takes. Pure."""
    folders = [f"{name}={environment[name]}" for name in FOLDERS if environment.get(name)]
    return _TEXT.format(
        command=" ".join(map(_quoted, command)),
        in_vain=" ".join(str(int(code)) for code in IN_VAIN),
        later=int(ExitCode.TRY_LATER),
        description=unit.description,
        again_s=unit.again_s,
        nice=unit.nice,
        environment="".join(f"Environment={_escaped(one)}\n" for one in folders),
    )


def unit_path(unit: Unit = VOLUNTEER) -> Path:
    """Where systemd looks for it among a user's own units."""
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
    """Have it run, anew if it does. Raises `LocalError` HP-SVC-001, HP-SVC-002."""
    _installed(unit)
    _systemctl("restart", "--no-block", unit.name)  # it is ready once the network is joined


def uninstall(unit: Unit = VOLUNTEER) -> None:
    """Stop it, and start it no more. Raises `LocalError` HP-SVC-001, HP-SVC-002."""
    _installed(unit)
    try:
        _systemctl("disable", "--now", unit.name)
    finally:
        unit_path(unit).unlink(missing_ok=True)
    _systemctl("daemon-reload")


def properties(unit: Unit = VOLUNTEER) -> Mapping[str, str]:
    """What systemd says of it: ActiveState, SubState, UnitFileState, StatusText. Raises `LocalError` HP-SVC-001, HP-SVC-002."""
    _installed(unit)
    wanted = "ActiveState,SubState,UnitFileState,StatusText"
    lines = _systemctl("show", unit.name, "--property", wanted).splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def is_active(unit: Unit) -> bool:
    """Whether it is there, and runs. Raises as `properties`."""
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
    """What `systemctl --user` prints. Raises `LocalError` HP-SVC-001."""
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
    """One word of a command line in a unit: nothing in it is expanded."""
    return _escaped(word).replace("$", "$$")


def _escaped(word: str) -> str:
    """One word in a unit."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return '"' + escaped.replace("\n", "\\n") + '"'


def _unquoted(word: str) -> str:
    """What `_quoted` made a word of, without the marks around it."""
    escaped = {"\\\\": "\\", '\\"': '"', "\\n": "\n", "%%": "%", "$$": "$"}
    return re.sub(r'\\\\|\\"|\\n|%%|\$\$', lambda found: escaped[found[0]], word)
