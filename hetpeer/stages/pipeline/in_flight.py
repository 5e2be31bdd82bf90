"""How many microbatches a holder has under way, so that links are hidden behind computation. Pure; times are given.

Too few, and the worker waits for a gradient that is still travelling; too many, and they only wait for each other in
memory. As many as fill the way there and back are just enough: the highest rate at which gradients have returned,
times the least time that one has taken, as BBR fills a line (Cardwell et al., ACM Queue 14(5), 2016). A little more is
tried always: the rate only rises if there is something to carry.
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
    """The classic depth of 1F1B (PipeDream-Flush, DAPPLE), and one for each link on the way there and back."""
    return 2 * hops_after + 1


@dataclass(slots=True)
class _Way:
    """Microbatches that have the same number of hops before them. A step begins with nothing under way, so that its first
    ones show the least time again: what an earlier step has shown counts until then.
    """

    returned: int = 0
    trip: float = math.inf
    """Least seconds from the beginning of the forward to the end of the backward, in this step."""
    rate: float = 0.0
    """Most microbatches per second that returned while one was under way, in this step."""
    trip_before: float = math.inf
    rate_before: float = 0.0

    def end_step(self) -> None:
        if self.returned:
            self.trip_before, self.rate_before = self.trip, self.rate
        self.returned, self.trip, self.rate = 0, math.inf, 0.0

    @property
    def enough(self) -> float:
        """Microbatches that fill the way there and back; infinite while nothing is known."""
        trip = self.trip if self.returned else self.trip_before
        return max(self.rate, self.rate_before) * trip


class InFlightWindow:
    """Measured at one holder of one place. `most`: microbatches that its memory has room for. One that is told nothing has the classic depth."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._ways: dict[int, _Way] = {}
        self._under_way: dict[Task, tuple[int, int, float]] = {}
        """Task → (hops after it, how many had returned, when it began)."""

    def reset(self, most: int) -> None:
        """Another place, with room for so many: nothing is known of it."""
        self.most = min(most, MOST)
        self._ways.clear()
        self._under_way.clear()

    def begun(self, task: Task, hops_after: int, now: float) -> None:
        """The forward of `task` begins; `now` in seconds, by any clock that does not jump."""
        way = self._ways.setdefault(hops_after, _Way())
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
        """What is under way of `step` will not come back. What is of others goes on being counted with: it began when so many less had returned."""
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
