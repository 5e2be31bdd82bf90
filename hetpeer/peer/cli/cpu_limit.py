"""Limit on the processor time of a whole command, from its first import to its end."""

from __future__ import annotations

import time
from collections.abc import Callable

ENDING_S, ENDING = 0.4, 0.02
"""Reserve for the end of the search, printing and the interpreter's exit: seconds, and a share of the whole.
"""


def within(seconds: float) -> Callable[[], bool]:
    """A test that is True while a search may go on, for the whole command to take `seconds` of processor
    time.
    """
    until = seconds - max(ENDING_S, ENDING * seconds)
    return lambda: time.process_time() < until
