"""Lines for the person who started a daemon: on standard error, and in the daemon's log."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys

from hetpeer.dht.base.errors import escaped

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
    """Redirect standard error to /dev/null: otherwise flushing it at exit fails and spoils the exit
    status.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())
    os.close(nowhere)


def show_from(level: int) -> None:
    """Show messages of this level or above to the person."""
    _log.setLevel(level)


def is_quiet() -> bool:
    """Whether -q was given: errors only."""
    return not _log.isEnabledFor(logging.WARNING)
