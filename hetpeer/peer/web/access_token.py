"""Token of a daemon's web server: made once and kept in its folder for the owner, so that open pages survive
a restart.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from hetpeer.bootstrap.run.durable_files import atomic_write

FILE = "dashboard.token"
BYTES = 18
_TOKEN = re.compile(r"[A-Za-z0-9_-]{20,64}")


def token_of(folder: Path) -> str:
    """The token in `folder`; a new one if it is missing, damaged or readable by others. Raises `LocalError`
    HP-DISK-*.
    """
    path = folder / FILE
    try:
        if not path.stat().st_mode & 0o077 and _TOKEN.fullmatch(kept := path.read_text().strip()):
            return kept
    except (OSError, UnicodeDecodeError):
        pass
    made = secrets.token_urlsafe(BYTES)
    atomic_write(path, made.encode(), mode=0o600)
    return made
