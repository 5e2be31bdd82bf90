"""The log of a daemon, `daemon.log` in its folder: written, rotated, and read again."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Self

from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.dht.base.errors import ExitCode, HetpeerError, LocalError, escaped
from hetpeer.peer.process import console
from hetpeer.peer.process.console import SAID, JsonFormatter

FILE = "daemon.log"
MAX_BYTES = 2 << 20
"""Size limit of one file; about a day of a volunteer at work."""
OLDER = 3
"""Files that are kept beside the newest: `daemon.log.1` is the last one before it."""
MAX_LINE = 1 << 20
"""Bytes; no line of ours is longer."""
MAX_TIME = 1e11
"""Seconds since 1970 that any calendar has."""


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


@dataclass(frozen=True, slots=True)
class LogLine:
    """One message; `raw` is its line in the file without the newline."""

    raw: str
    time: float
    level: str
    event: str
    traceback: str = ""

    @classmethod
    def read(cls, raw: str) -> Self | None:
        """The message in a line; None for a damaged one, as a power cut leaves it."""
        try:
            fields = json.loads(raw)
            moment, level, event = float(fields["time"]), str(fields["level"]), str(fields["event"])
            traceback = str(fields.get("traceback", ""))
        except (ValueError, TypeError, KeyError):
            return None
        return cls(raw, moment, level, event, traceback) if 0 <= moment < MAX_TIME else None

    def lines(self, *, colours: bool) -> Iterator[str]:
        """Lines for people: `2026-11-25 12:04:11 warning what happened`, with the traceback below."""
        yield console.log_line(
            self.time, self.level, self.event, pattern="%Y-%m-%d %H:%M:%S", colours=colours
        )
        yield from (f"    {escaped(line)}" for line in self.traceback.splitlines())


class LogReader:
    """Reader of one home's log. Raises `LocalError` HP-CTL-004 if there is none."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE
        self._rest = b""
        try:
            self._file: IO[bytes] = self._path.open("rb")
        except OSError as error:
            raise LocalError(
                "HP-CTL-004",
                f"there is no log in {home}",
                why=f"{error.strerror}: no hetpeer has run from there, or it belongs to another user",
                fix="give the right folder with --home (for a reliable peer: its run directory)",
                exit_code=ExitCode.NOT_RUNNING,
            ) from error

    def last(self, count: int) -> list[LogLine]:
        """The newest `count` messages, the oldest first; `news` goes on behind them."""
        found = deque(self.news(), maxlen=count)
        for number in range(1, OLDER + 1):
            if len(found) >= count:
                break
            found.extendleft(reversed(self._older(number)[len(found) - count :]))
        return list(found)

    def news(self) -> list[LogLine]:
        """Messages since the last call, also across a rotation of the files."""
        lines = self._lines()
        if (newer := self._newer()) is not None:
            lines += self._lines()  # the last ones before it was replaced
            self.close()
            self._file, self._rest = newer, b""
            lines += self._lines()
        return [entry for line in lines if (entry := LogLine.read(line.decode(errors="replace")))]

    def close(self) -> None:
        self._file.close()

    def _lines(self) -> list[bytes]:
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        self._rest = self._rest[-MAX_LINE:]
        return lines

    def _newer(self) -> IO[bytes] | None:
        """The file that is written by now, where that is not ours any more."""
        try:
            there = self._path.open("rb")
        except OSError:  # between two names; at the next look it is there
            return None
        if os.path.sameopenfile(there.fileno(), self._file.fileno()):
            there.close()
            return None
        return there

    def _older(self, number: int) -> list[LogLine]:
        """Lines of rotated file `number`; none if it is gone, or is the one that we read."""
        try:
            with self._path.with_name(f"{FILE}.{number}").open("rb") as file:
                # ours has just become an older one
                if os.path.sameopenfile(file.fileno(), self._file.fileno()):
                    return []
                lines = file.read().split(b"\n")
        except OSError:
            return []
        return [entry for line in lines if (entry := LogLine.read(line.decode(errors="replace")))]
