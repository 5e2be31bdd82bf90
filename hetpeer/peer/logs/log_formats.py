"""Formats of a log message: a line for people, and JSON. Imports nothing heavy, because every command loads
it.
"""

from __future__ import annotations

import json
import logging
import re
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


def level_of(record: logging.LogRecord) -> str:
    """Name of the level as in Python; libraries rename levels (hivemind's warnings are "WARN")."""
    return _LEVELS.get(record.levelno, record.levelname).lower()


def line(seconds: float, level: str, event: str, *, pattern: str = "%H:%M:%S", colours: bool = False) -> str:
    """`12:04:11 warning what happened`, the level in colour if wanted. `seconds` since 1970."""
    shown = level
    if colours and (colour := _COLOURS.get(level)):
        shown = f"\x1b[{colour}m{level}\x1b[0m"
    return f"{time.strftime(pattern, time.localtime(seconds))} {shown} {escaped(event)}"


class PlainFormatter(logging.Formatter):
    """Format for people: `line`, with the traceback below."""

    def __init__(self, *, colours: bool) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        text = line(record.created, level_of(record), record.getMessage(), colours=self._colours)
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
