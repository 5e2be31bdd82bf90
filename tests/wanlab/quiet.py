"""Measurements of time on a machine whose processors the host also gives to others.

What was measured while it did so says nothing about the laboratory. It is measured again, for that reason
alone: whether the figure is a good one is not looked at.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
MOST = 0.02
"""Of the processors' time that the host may take meanwhile."""
WITHIN_S = 120.0


def undisturbed(measure: Callable[[], T]) -> T:
    """What the first `measure()` returns during which the host took next to nothing.

    Fails if none is such within WITHIN_S.
    """
    until = time.monotonic() + WITHIN_S
    while True:
        before = psutil.cpu_times()
        found = measure()
        part = stolen(before, psutil.cpu_times())
        if part <= MOST:
            return found
        assert time.monotonic() < until, (
            f"the host takes {part:.0%} of the processors: nothing can be measured"
        )


def stolen(before: Any, now: Any) -> float:
    """The part of the processors' time in between that other virtual machines had, by `psutil.cpu_times`."""
    return float((now.steal - before.steal) / max(sum(now) - sum(before), 1e-9))
