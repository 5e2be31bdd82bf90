"""Files of a volunteer's limits: its settings (`config.toml`), and this month's traffic (`transfer.json`).

A change of one setting keeps the rest of `config.toml` as typed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.bootstrap.run.durable_files import atomic_write, disk_errors
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.limits.setting_layers import (
    COMMAND_LINE,
    MergedSettings,
    SettingsLayer,
    merged,
    of_environment,
    of_file,
    wrong_setting,
)
from hetpeer.peer.limits.settings import Settings
from hetpeer.peer.limits.web_address import parse_where
from hetpeer.peer.process.home import state_home

CONFIG_FILE = "config.toml"
TRAFFIC_FILE = "transfer.json"

_log = logging.getLogger(__name__)


def config_path(home: Path) -> Path:
    """Path of the file: in `home`; for the default home in the user's configuration folder."""
    if home.absolute() != state_home().absolute():
        return home / CONFIG_FILE
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "hetpeer" / CONFIG_FILE


def read(path: Path) -> SettingsLayer:
    """Settings of the file; none if it does not exist. Raises `LocalError` HP-CONF-003."""
    return of_file(_tables(path, _text(path)), str(path))


def effective(home: Path, options: Mapping[str, Any]) -> MergedSettings:
    """Settings in force for `home`; `options` are those given on the command line.

    Raises `LocalError` HP-CONF-003.
    """
    file, environment = read(config_path(home)), of_environment(os.environ)
    return merged([file, *environment, SettingsLayer(COMMAND_LINE, options)])


def write(path: Path, changes: Mapping[str, Any]) -> bool:
    """Set `section.key` → value in the file; failure changes nothing. Whether the file has changed.

    Raises as `changed`, and `LocalError` HP-DISK-001, HP-DISK-002.
    """
    text = changed(path, changes)
    if text == _text(path):
        return False
    with disk_errors(path):
        there = path.resolve()  # it may be a link to where somebody keeps such files
        there.parent.mkdir(parents=True, exist_ok=True)
        mode = stat.S_IMODE(there.stat().st_mode) if there.exists() else 0o644
    atomic_write(there, text.encode(), mode)
    return True


def changed(path: Path, changes: Mapping[str, Any]) -> str:
    """Text of the file with some settings changed; lines that say the same already stay.

    Raises `LocalError` HP-CONF-003 for a wrong value, HP-WEB-002 for a wrong place of the dashboard.
    """
    before = read(path)
    after = merged([SettingsLayer(before.source, {**before.values, **changes})]).settings
    parse_where(after.dashboard.listen)
    text, values = _text(path), after.flat()
    for key in changes:
        if key not in before.values or merged([before]).settings.flat()[key] != values[key]:
            text = edited(text, key, values[key])
    if not _says(text, after):
        names = ", ".join(changes)
        raise wrong_setting(names, str(path), "it is not on a line of its own in the file; change it by hand")
    return text


def edited(text: str, key: str, value: Any) -> str:
    """`text` with `section.key` set: its line is replaced or added to its section, also a new one. Pure."""
    section, _, name = key.partition(".")
    line = f"{name} = {_toml(value)}"
    lines = text.removesuffix("\n").split("\n") if text else []  # splitlines knows ends that TOML does not
    head = next((n for n, old in enumerate(lines) if re.fullmatch(rf"\s*\[{section}\]\s*(#.*)?", old)), None)
    if head is None:
        return "\n".join([*lines, *([""] if lines else []), f"[{section}]", line, ""])
    end = next((n for n in range(head + 1, len(lines)) if lines[n].lstrip().startswith("[")), len(lines))
    old = next((n for n in range(head + 1, end) if re.match(rf"\s*{name}\s*=", lines[n])), None)
    lines[head + 1 if old is None else old : head + 1 if old is None else old + 1] = [line]
    return "\n".join([*lines, ""])


def _says(text: str, settings: Settings) -> bool:
    try:
        return merged([of_file(tomllib.loads(text), "")]).settings == settings
    except (tomllib.TOMLDecodeError, LocalError):
        return False


def _toml(value: Any) -> str:
    """TOML of a text, number, bool or tuple of texts: JSON, but without escapes beyond the basic plane."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    # a wrong home is reported by the code that needs it
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except UnicodeDecodeError as error:
        raise _unreadable(path, "it is not a text file in UTF-8") from error
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error


def _tables(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _unreadable(path, f"it is no TOML: {error}") from error


def _unreadable(path: Path, why: str) -> LocalError:
    """HP-CONF-003."""
    return LocalError(
        "HP-CONF-003",
        f"the settings in {path} cannot be read",
        why=why,
        fix="correct the file, or remove it",
        exit_code=ExitCode.CONFIG,
    )


Count = Annotated[int, Field(ge=0)]


class Month(BaseModel):
    """Bytes of one month of the local calendar, like `2026-11`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    month: str
    sent: Count = 0
    received: Count = 0

    @property
    def nbytes(self) -> int:
        """Bytes sent and received."""
        return self.sent + self.received

    def plus(self, month: str, sent: int, received: int) -> Month:
        """The month with more bytes; a new `month` begins with them."""
        before = self if month == self.month else Month(month=month)
        return Month(month=month, sent=before.sent + sent, received=before.received + received)


def load_month(home: Path, month: str) -> Month:
    """The saved month, which may be over; an empty one if none is saved."""
    path = home / TRAFFIC_FILE
    try:
        return Month.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Month(month=month)
    except (OSError, ValidationError) as error:
        _log.warning("%s is damaged, so this month's traffic is counted from 0: %s", path, error)
        return Month(month=month)


def save_month(home: Path, month: Month) -> None:
    """Write the file as a whole. Raises `LocalError` HP-DISK-001, HP-DISK-002."""
    atomic_write(home / TRAFFIC_FILE, month.model_dump_json().encode())
