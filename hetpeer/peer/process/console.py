"""What a daemon tells the person who started it: a line now and then, on standard error, and in its log if it keeps one."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys

from hetpeer.dht.base.printable import escaped

_log = logging.getLogger(__name__)
SAID = logging.getLogger("hetpeer.said")
"""Gets what was said, for the log; nothing of it is shown a second time."""
SAID.propagate = False

LOOK_S = 0.5
EVERY_S = 5.0
"""Seconds between two lines while nothing but the step number changes."""
GONE = frozenset({errno.EPIPE, errno.EIO})
"""What writing to a pipe that nobody reads gives, and to a terminal that was closed."""


def say(line: str) -> None:
    """One line for the person, at once; with --quiet for the log alone."""
    if not is_quiet():
        tell(line)
    SAID.info("%s", line)


def tell(line: str) -> None:
    """One line for the person alone, --quiet or not: part of it may come from peers. Never raises: nothing ends because nobody reads any more what is said."""
    try:
        print(escaped(line), file=sys.stderr, flush=True)
    except OSError as error:
        if error.errno in GONE:
            with contextlib.suppress(OSError):
                _say_to_nobody()


def _say_to_nobody() -> None:
    """Standard error leads nowhere from now on: what is buffered would fail at the end of the process, and its exit status with it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())
    os.close(nowhere)


def show_from(level: int) -> None:
    """What the person wants to see: messages of this level or above."""
    _log.setLevel(level)


def is_quiet() -> bool:
    """Whether -q was given: errors only."""
    return not _log.isEnabledFor(logging.WARNING)
