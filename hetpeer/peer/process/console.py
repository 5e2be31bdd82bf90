"""Lines for the person who started a command: on standard error, and in a daemon's log as text or JSON.

Imports nothing heavy, because every command loads it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import sys
import time
from typing import Any

from hetpeer.dht.base.errors import escaped

MAX_EVENT = 4096
"""Characters of one message in JSON, and of its traceback the last eight times as many."""
_COLOURS = {"warning": "33", "error": "31", "critical": "31"}
_LEVELS = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "critical",
}
_TOKEN = re.compile(r"(token=)[^\s&]+")

_log = logging.getLogger(__name__)
SAID = logging.getLogger("hetpeer.said")
"""Gets what was said, for the log; nothing of it is shown a second time."""
SAID.propagate = False

LOOK_S = 0.5
EVERY_S = 5.0
"""Seconds between two lines while nothing but the step number changes."""
GONE = frozenset({errno.EPIPE, errno.EIO})
"""Errors of writing to a pipe without a reader and to a closed terminal."""


def say(line: str) -> None:
    """Show one line and write it to the log; with --quiet only to the log."""
    if not is_quiet():
        tell(line)
    SAID.info("%s", line)


def tell(line: str) -> None:
    """Show one line, also with --quiet, without logging it. Parts of it may come from peers, so it is
    escaped.

    Never raises: a closed terminal must not end a daemon.
    """
    try:
        print(escaped(line), file=sys.stderr, flush=True)
    except OSError as error:
        if error.errno in GONE:
            with contextlib.suppress(OSError):
                _say_to_nobody()


def _say_to_nobody() -> None:
    """Redirect stderr to /dev/null, so that flushing it at exit cannot fail and spoil the exit status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())
    os.close(nowhere)


def show_from(level: int) -> None:
    """Show messages of this level or above to the person."""
    _log.setLevel(level)


def is_quiet() -> bool:
    """Whether -q was given: errors only."""
    return not _log.isEnabledFor(logging.WARNING)


def level_of(record: logging.LogRecord) -> str:
    """Name of the level as in Python; libraries rename levels (hivemind's warnings are "WARN")."""
    return _LEVELS.get(record.levelno, record.levelname).lower()


def log_line(
    seconds: float, level: str, event: str, *, pattern: str = "%H:%M:%S", colours: bool = False
) -> str:
    """`12:04:11 warning what happened`, the level in colour if wanted. `seconds` since 1970."""
    shown = level
    if colours and (colour := _COLOURS.get(level)):
        shown = f"\x1b[{colour}m{level}\x1b[0m"
    return f"{time.strftime(pattern, time.localtime(seconds))} {shown} {escaped(event)}"


class PlainFormatter(logging.Formatter):
    """Format for people: `log_line`, with the traceback below."""

    def __init__(self, *, colours: bool) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        text = log_line(record.created, level_of(record), record.getMessage(), colours=self._colours)
        if not record.exc_info:
            return text
        return "\n".join([text, *map(escaped, self.formatException(record.exc_info).split("\n"))])


class JsonFormatter(logging.Formatter):
    """Format for machines: one JSON object a line, without the dashboard's token."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": level_of(record),
            "logger": record.name,
            "event": _TOKEN.sub(r"\1…", record.getMessage())[:MAX_EVENT],
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)[-8 * MAX_EVENT :]
        return json.dumps(fields)
