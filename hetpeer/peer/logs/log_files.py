"""The log file of a daemon: messages from `info` on and every line shown to the person, whatever the terminal
shows.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.dht.base.errors import HetpeerError
from hetpeer.peer.logs.log_formats import JsonFormatter
from hetpeer.peer.process.console import SAID

FILE = "daemon.log"
MAX_BYTES = 2 << 20
"""Size limit of one file; about a day of a volunteer at work."""
OLDER = 3
"""Files that are kept beside the newest: `daemon.log.1` is the last one before it."""


@contextmanager
def keeping_log(home: Path) -> Iterator[None]:
    """Write this process's log, and the error that ends it, into the existing folder `home`. One process at a
    time.

    Raises `LocalError` HP-DISK-001, HP-DISK-002. A disk that fills up later ends the log, not the daemon.
    """
    with disk_errors(home / FILE):
        handler = _RotatingLog(home / FILE)
    ours = logging.getLogger("hetpeer")
    before = ours.level
    ours.setLevel(min(ours.getEffectiveLevel(), logging.INFO))
    listening = (logging.getLogger(), SAID)
    for logger in listening:
        logger.addHandler(handler)
    try:
        yield
    except Exception as error:
        if isinstance(error, HetpeerError):
            SAID.error(error.line())
        else:
            SAID.exception("ended by what it did not expect")
        raise
    finally:
        for logger in listening:
            logger.removeHandler(handler)
        ours.setLevel(before)
        with suppress(OSError):  # what could not be written cannot be written now
            handler.close()


class _RotatingLog(RotatingFileHandler):
    """A log file of bounded size with mode 0600."""

    def __init__(self, path: Path) -> None:
        self._failed = False
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=OLDER, encoding="utf-8")
        self.setFormatter(JsonFormatter())

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.baseFilename, flags, 0o600)
        os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - logging's names
        """Report the first failed write only."""
        if not self._failed:
            self._failed = True
            reason = sys.exception()
            print(f"the log {self.baseFilename} is not whole: {reason}", file=sys.stderr)
