"""An owner's name and limits given to `join` once: kept in `config.toml`, and in force at later starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.limits.config_file import config_path, write
from hetpeer.peer.limits.setting_layers import COMMAND_LINE, MergedSettings, worded
from hetpeer.peer.limits.settings import KEYS

OWNERS = tuple(key for key in KEYS if key.partition(".")[0] in ("node", "compute", "limits", "when"))
"""Settings of a volunteer whose options are kept. Addresses, ports and the dashboard are of one call."""

_log = logging.getLogger(__name__)


def keep_options(home: Path, found: MergedSettings, keys: Sequence[str] = OWNERS) -> Iterator[str]:
    """Write the owner's options for `keys` into the file of `home`; a line of what was kept, and of what it
    had.

    A file that cannot be changed stays as it is, and a warning says so: the options count for this time.
    """
    path, values = config_path(home), found.settings.flat()
    given = [key for key in keys if found.sources.get(key) == COMMAND_LINE]
    before = [key for key in keys if found.sources.get(key) == str(path)]
    if before:
        yield f"in force by {path}: {_listed(found, before)}"
    if not given:
        return
    try:
        if write(path, {key: values[key] for key in given}):
            yield f"kept in {path} for later starts: {_listed(found, given)}"
    except LocalError as error:
        _log.warning(
            "these options count for this time only: %s; why: %s: %s",
            _listed(found, given),
            error.what,
            error.why,
        )


def _listed(found: MergedSettings, keys: list[str]) -> str:
    values = found.settings.flat()
    return ", ".join(f"{key} {worded(values[key]) or 'none'}" for key in keys)
