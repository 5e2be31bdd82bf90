"""Files that a daemon may use as a service: its own, Python's and the system's, and no others of its user.

The unit asks for it (`VARIABLE`; docs/daemon.md, "Under systemd"). It covers p2pd and the compute worker,
which have stricter rules of their own.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.dht.base import landlock

VARIABLE: Final = "HETPEER_CONFINED"
"""Set by a service's unit: the daemon confines itself."""

_READ = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/etc", "/run", "/sys")
"""Programs, libraries, the resolver's files, sensors. Sockets are no files to Landlock."""
_USE = ("/proc", "/dev")
"""Readable and writable as before: the kernel guards them. CUDA names its threads in /proc."""

_log = logging.getLogger(__name__)


def confine_service(folders: Sequence[Path]) -> None:
    """If this is a confined service: give up all files but the daemon's own `folders`, and the system's.

    `folders` are made if they do not exist. Call it before there are other threads: these would keep their
    rights. A kernel that cannot do it is a warning. Raises `LocalError` HP-DISK-001.
    """
    if os.environ.get(VARIABLE) is None or os.environ.get(landlock.VARIABLE) == "off":
        return
    for folder in folders:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    package = Path(__file__).resolve().parents[2]
    screen = Path(os.environ.get("XAUTHORITY") or Path.home() / ".Xauthority")
    reading = (*landlock.python_paths(package), *map(Path, _READ), screen)
    changing = (*folders, Path(tempfile.gettempdir()))
    try:
        rules = landlock.ruleset(
            [
                *((path, landlock.READ) for path in reading if path.exists()),
                (package.parent, landlock.READ_DIR),  # where the worker's Python looks for the package
                *((Path(name), landlock.CHANGE | landlock.EXECUTE) for name in _USE),
                *((path.resolve(), landlock.CHANGE) for path in changing),
            ],
            tcp=True,
            others=True,
        )
        try:
            landlock.enter(rules)
        finally:
            os.close(rules)
    except OSError as error:
        _log.warning("the service can use its user's files: %s", error.strerror)
