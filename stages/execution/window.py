"""How many microbatches a holder has under way, so that links are hidden behind computation. Pure; times are given.

Too few, and the worker waits for a gradient that is still travelling; too many, and they only wait for each other in
memory. As many as fill the way there and back are just enough: the highest rate at which gradients have returned,
times the least time that one has taken, as BBR fills a line (Cardwell et al., ACM Queue 14(5), 2016). A little more is
tried always: the rate only rises if there is something to carry.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

SAMPLES = 64
"""Microbatches that the estimate looks back at."""
GAIN = 2.0
MOST = 64

Depth = Callable[[int], int]
"""Hops after this one → forwards that may wait for their gradient."""


def shortest(hops_after: int) -> int:
    """The classic depth of 1F1B (PipeDream-Flush, DAPPLE), and one for each link on the way there and back."""
    return 2 * hops_after + 1


@dataclass(slots=True)
class _Way:
    """Microbatches that have the same number of hops before them."""

    returned: int = 0
    trips: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """Seconds from the beginning of the forward to the end of the backward."""
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """Microbatches per second that returned while one was under way."""


class Window:
    """Measured at one holder of one place. `most`: microbatches that its memory has room for."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._ways: dict[int, _Way] = {}
        self._under_way: dict[Hashable, tuple[int, int, float]] = {}
        """Key → (hops after it, how many had returned, when it began)."""

    def reset(self, most: int) -> None:
        """Another place, with room for so many: nothing is known of it."""
        self._most = min(most, MOST)
        self._ways.clear()
        self._under_way.clear()

    def begun(self, key: Hashable, hops_after: int, now: float) -> None:
        """The forward of `key` begins; `now` in seconds, by any clock that does not jump."""
        way = self._ways.setdefault(hops_after, _Way())
        self._under_way[key] = hops_after, way.returned, now

    def finished(self, key: Hashable, now: float) -> None:
        """The backward of `key` is done."""
        if key not in self._under_way:
            return
        hops_after, returned, began = self._under_way.pop(key)
        way = self._ways[hops_after]
        way.returned += 1
        trip = max(now - began, 1e-9)
        way.trips.append(trip)
        way.rates.append((way.returned - returned) / trip)

    def end_step(self) -> None:
        """What is under way now will not come back."""
        self._under_way.clear()

    def depth(self, hops_after: int) -> int:
        """How many forwards may wait for their gradient."""
        least = shortest(hops_after)
        way = self._ways.get(hops_after)
        if not hops_after or way is None or not way.trips:
            return least
        enough = math.ceil(GAIN * max(way.rates) * min(way.trips)) + 1
        return max(least, min(enough, self._most))
