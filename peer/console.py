"""What a daemon tells the person who started it: a line now and then, on standard error."""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger(__name__)

LOOK_S = 0.5
EVERY_S = 5.0
"""Seconds between two lines while nothing but the step number changes."""


def say(line: str) -> None:
    """One line for the person, at once; nothing with --quiet."""
    if _log.isEnabledFor(logging.WARNING):
        print(line, file=sys.stderr, flush=True)
