"""Processor time that a command may take, from its first import to its end."""

from __future__ import annotations

import time
from collections.abc import Callable

ENDING_S, ENDING = 0.4, 0.02
"""What is left for the search's last work, printing and the interpreter's end: seconds, and a part of all."""


def within(seconds: float) -> Callable[[], bool]:
    """True as long as a search may go on so that the whole command takes no more than so many seconds of processor time."""
    until = seconds - max(ENDING_S, ENDING * seconds)
    return lambda: time.process_time() < until
