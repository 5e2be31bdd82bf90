"""The window of microbatches in flight at a holder, which hides links behind computation. Pure; times are
given.

With too few, the worker waits for a gradient that is still travelling; with too many, they only wait for each
other in memory. As many as fill the round trip are just enough: the highest rate at which gradients have
returned, times the least time that one has taken, as BBR fills a link (Cardwell et al., ACM Queue 14(5),
2016). A few more are always tried: the rate rises only if there is something to carry.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

GAIN = 2.0
MOST = 64

Task = tuple[Hashable, Hashable]
"""A step, and a microbatch in it."""


def shortest(hops_after: int) -> int:
    """The depth of 1F1B (PipeDream-Flush, DAPPLE), plus one for each link on the round trip."""
    return 2 * hops_after + 1


@dataclass(slots=True)
class _TripMeasurements:
    """Measurements of microbatches with equally many hops after them.

    A step begins with nothing in flight, so that its first microbatches show the least time again; until then
    the last step's measurements count.
    """

    returned: int = 0
    trip: float = math.inf
    """Least seconds from the start of a forward to the end of its backward, in this step."""
    rate: float = 0.0
    """Most microbatches per second that returned while one was in flight, in this step."""
    trip_before: float = math.inf
    rate_before: float = 0.0

    def end_step(self) -> None:
        if self.returned:
            self.trip_before, self.rate_before = self.trip, self.rate
        self.returned, self.trip, self.rate = 0, math.inf, 0.0

    @property
    def enough(self) -> float:
        """Microbatches that fill the round trip; infinite while nothing is known."""
        trip = self.trip if self.returned else self.trip_before
        return max(self.rate, self.rate_before) * trip


class InFlightWindow:
    """The window of one holder in one place. `most`: microbatches that its memory has room for.

    Without measurements it has the depth of 1F1B.

        window = InFlightWindow(most=16)
        window.begun(("step 7", 3), hops_after=2, now=0.0)
        window.finished(("step 7", 3), now=1.5)
        window.depth(hops_after=2)  # forwards that may wait for their gradient
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._ways: dict[int, _TripMeasurements] = {}
        self._under_way: dict[Task, tuple[int, int, float]] = {}
        """Task → (hops after it, how many had returned when it began, when it began)."""

    def reset(self, most: int) -> None:
        """Forget the measurements: another place, with room for `most`."""
        self.most = min(most, MOST)
        self._ways.clear()
        self._under_way.clear()

    def begun(self, task: Task, hops_after: int, now: float) -> None:
        """The forward of `task` begins; `now` in seconds of any clock that does not jump."""
        way = self._ways.setdefault(hops_after, _TripMeasurements())
        self._under_way[task] = hops_after, way.returned, now

    def finished(self, task: Task, now: float) -> None:
        """The backward of `task` is done."""
        if task not in self._under_way:
            return
        hops_after, returned, began = self._under_way.pop(task)
        way = self._ways[hops_after]
        way.returned += 1
        trip = max(now - began, 1e-9)
        way.trip = min(way.trip, trip)
        way.rate = max(way.rate, (way.returned - returned) / trip)

    def end_step(self, step: Hashable) -> None:
        """End `step`: its tasks in flight will not return. Tasks of other steps stay, with their counts
        adjusted.
        """
        self._under_way = {
            task: (hops_after, returned - self._ways[hops_after].returned, began)
            for task, (hops_after, returned, began) in self._under_way.items()
            if task[0] != step
        }
        for way in self._ways.values():
            way.end_step()

    def depth(self, hops_after: int) -> int:
        """How many forwards may wait for their gradient."""
        least = shortest(hops_after)
        way = self._ways.get(hops_after)
        if not hops_after or way is None or not math.isfinite(way.enough):
            return least
        return max(least, min(math.ceil(GAIN * way.enough) + 1, self.most))
