"""Measurements of time on a machine whose processors the host also gives to others.

What was measured while it did so says nothing about the laboratory. It is measured again, for that reason alone: whether the figure
is a good one is not looked at.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")
MOST = 0.02
"""Of the processors' time that the host may take meanwhile."""
WITHIN_S = 120.0


def undisturbed(measure: Callable[[], T]) -> T:
    """What the first `measure()` returns during which the host took next to nothing. Fails if none is such within WITHIN_S."""
    until = time.monotonic() + WITHIN_S
    while True:
        before = psutil.cpu_times()
        found = measure()
        after = psutil.cpu_times()
        stolen = (after.steal - before.steal) / max(sum(after) - sum(before), 1e-9)
        if stolen <= MOST:
            return found
        assert time.monotonic() < until, (
            f"the host takes {stolen:.0%} of the processors: nothing can be measured"
        )
