"""Virtual time: things that happen later, in order. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

TICK_S = 2.0**-32
"""Time goes in steps of a quarter of a nanosecond: their sums and differences are exact for days, so what takes a second takes just as long at any time."""


class Timeline:
    """`now` in seconds from the beginning; it moves as `run` lets things happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        """Let `happens` happen so many seconds from now, in whole ticks; what is due at the same time, in the order of these calls."""
        due = self.now + math.ceil(seconds / TICK_S) * TICK_S
        heapq.heappush(self._events, (due, next(self._order), happens))

    def run(self, until: Callable[[], bool]) -> None:
        """Let things happen until `until()`. Raises RuntimeError if nothing is left to happen before that."""
        while not until():
            if not self._events:
                raise RuntimeError("nothing is under way any more, and it is not over")
            self.now, _, happens = heapq.heappop(self._events)
            happens()

    def clear(self) -> None:
        """What is still to come does not happen."""
        self._events.clear()
