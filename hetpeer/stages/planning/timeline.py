"""Virtual time: later events, in order. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

TICK_S = 2.0**-32
"""Time unit, a quarter of a nanosecond: sums and differences are exact for days, so durations never drift."""


class Timeline:
    """`now` in seconds from the beginning; it advances as `run` lets events happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        """Schedule `happens` for `seconds` from now, rounded up to ticks. Simultaneous events keep the order
        of calls.
        """
        due = self.now + math.ceil(seconds / TICK_S) * TICK_S
        heapq.heappush(self._events, (due, next(self._order), happens))

    def run(self, until: Callable[[], bool]) -> None:
        """Let events happen until `until()`. Raises RuntimeError if none is left before that."""
        while not until():
            if not self._events:
                raise RuntimeError("nothing is under way any more, and it is not over")
            self.now, _, happens = heapq.heappop(self._events)
            happens()

    def clear(self) -> None:
        """Cancel all events."""
        self._events.clear()
