"""Virtual time: things that happen later, in order. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timeline:
    """`now` in seconds from the beginning; it moves as `run` lets things happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        """Let `happens` happen so many seconds from now; what is due at the same time, in the order of these calls."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), happens))

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
