"""Reading a daemon's log while it may be written, also across its files; the daemon need not run."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from hetpeer.dht.base.errors import ExitCode, LocalError, escaped
from hetpeer.peer.logs import log_formats
from hetpeer.peer.logs.log_files import FILE, OLDER

MAX_LINE = 1 << 20
"""Bytes; no line of ours is longer."""
MAX_TIME = 1e11
"""Seconds since 1970 that any calendar has."""


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
        yield log_formats.line(
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
        try:
            with self._path.with_name(f"{FILE}.{number}").open("rb") as file:
                if os.path.sameopenfile(
                    file.fileno(), self._file.fileno()
                ):  # ours has just become an older one
                    return []
                lines = file.read().split(b"\n")
        except OSError:
            return []
        return [entry for line in lines if (entry := LogLine.read(line.decode(errors="replace")))]
