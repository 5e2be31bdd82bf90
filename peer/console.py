"""What a daemon tells the person who started it: a line now and then, on standard error, and in its log if it keeps one."""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger(__name__)
SAID = logging.getLogger("hetpeer.said")
"""Gets what was said, for the log; nothing of it is shown a second time."""
SAID.propagate = False

LOOK_S = 0.5
EVERY_S = 5.0
"""Seconds between two lines while nothing but the step number changes."""


def say(line: str) -> None:
    """One line for the person, at once; with --quiet for the log alone."""
    if not is_quiet():
        print(line, file=sys.stderr, flush=True)
    SAID.info("%s", line)


def show_from(level: int) -> None:
    """What the person wants to see: messages of this level or above."""
    _log.setLevel(level)


def is_quiet() -> bool:
    """Whether -q was given: errors only."""
    return not _log.isEnabledFor(logging.WARNING)
