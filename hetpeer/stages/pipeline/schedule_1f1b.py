"""The order of work at a holder's worker: 1F1B in each step, older steps first, and a window for all of them.

Pure; times are given. Within a step (`Schedule`), backwards go first, because they free memory and let
earlier peers go on. Forwards begin only while few enough of them wait for their gradient. A task that waits
for a later peer must not block that peer's own way to the loss, or a route that passes a holder twice could
wait for itself. So a forward's bound counts only tasks `within` its distance: at most as many blocks from the
loss, and at most as many hops. Hops alone would not do: the rest of a route may have changed, and then they
need not fall along it. Evaluation forwards keep nothing and are not counted.

The steps under way share the worker (`WorkerQueue`): only DEPTH pieces of work are there at a time, of
whatever step, and one more for each further device of a divided place. Backwards of any step go before
forwards, and older steps before younger ones, because they are committed first.

The window (`InFlightWindow`) bounds the forwards of all steps that wait for their gradient, and so hides
links behind computation. With too few, the worker waits for a gradient that is still travelling; with too
many, they only wait for each other in memory. As many as fill the round trip are just enough: the highest
rate at which gradients have returned, times the least time that one has taken, as BBR fills a link (Cardwell
et al., ACM Queue 14(5), 2016). A few more are always tried: the rate rises only if there is something to
carry.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from hetpeer.stages.pipeline.routes import Route

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
        self.devices = 1
        """Devices of ours that a microbatch passes through, one after another."""
        self._ways: dict[int, _TripMeasurements] = {}
        self._under_way: dict[Task, tuple[int, int, float]] = {}
        """Task → (hops after it, how many had returned when it began, when it began)."""

    def reset(self, most: int, devices: int = 1) -> None:
        """Forget the measurements: another place, with room for `most`, divided among so many `devices`."""
        self.most = min(most, MOST)
        self.devices = devices
        self._ways.clear()
        self._under_way.clear()

    def begun(self, task: Task, hops_after: int, now: float) -> None:
        """The forward of `task` begins; `now` in seconds of any clock that does not jump."""
        way = self._ways.setdefault(hops_after, _TripMeasurements())
        self._under_way[task] = hops_after, way.returned, now

    def finished(self, task: Task, now: float) -> None:
        """Take `task` out of the window: its backward is done."""
        if task not in self._under_way:
            return
        hops_after, returned, began = self._under_way.pop(task)
        way = self._ways[hops_after]
        way.returned += 1
        trip = max(now - began, 1e-9)
        way.trip = min(way.trip, trip)
        way.rate = max(way.rate, (way.returned - returned) / trip)

    def end_step(self, step: Hashable) -> None:
        """End `step`: its tasks in flight will not return. Counts of other steps' tasks are adjusted."""
        self._under_way = {
            task: (hops_after, returned - self._ways[hops_after].returned, began)
            for task, (hops_after, returned, began) in self._under_way.items()
            if task[0] != step
        }
        for way in self._ways.values():
            way.end_step()

    def depth(self, hops_after: int) -> int:
        """Number of forwards that may wait for their gradient.

        Each further device can have one more at work, if there is memory for it.
        """
        shallow = shortest(hops_after)
        least = max(shallow, min(shallow + self.devices - 1, self.most))
        way = self._ways.get(hops_after)
        if not hops_after or way is None or not math.isfinite(way.enough):
            return least
        return max(least, min(math.ceil(GAIN * way.enough) + 1, self.most))


Key = TypeVar("Key", bound=Hashable)


def blocks_left(route: Route) -> int:
    """Blocks from the beginning of `route` to the loss.

    It falls from hop to hop even if the rest of the route changes, which the number of remaining hops does
    not. So waiting in this order cannot be circular.
    """
    return route[-1].end - route[0].begin


class LossDistance(NamedTuple):
    """A forward's distance from the loss: `blocks_left` including its own, `hops_after` its own."""

    blocks_left: int
    hops_after: int

    @classmethod
    def of(cls, route: Route) -> LossDistance:
        """The distance of a task over `route`, its own hop first."""
        return cls(blocks_left(route), len(route) - 1)

    def within(self, other: LossDistance) -> bool:
        """Whether this one is no farther from the loss than `other`, by either measure."""
        return self.blocks_left <= other.blocks_left and self.hops_after <= other.hops_after


class ScheduledWork(NamedTuple, Generic[Key]):
    """The next piece of work: `backward` of `key`, or its forward."""

    key: Key
    backward: bool


class _Forward(NamedTuple, Generic[Key]):
    """A forward that is ready."""

    key: Key
    reach: LossDistance
    train: bool
    attempt: int


class Schedule(Generic[Key]):
    """Work of one step that is ready, in the order in which to do it.

    It takes its turn in `queue`. `may_fold`: whether a slot has room for a backward. `may_begin`: whether a
    forward's inputs are here and the link for its output has room. `waits_for_older`: further on, forwards of
    this step may wait until an older one is committed.
    """

    def __init__(
        self,
        queue: WorkerQueue,
        may_fold: Callable[[], bool] = lambda: True,
        may_begin: Callable[[Key], bool] = lambda _: True,
        *,
        waits_for_older: bool = False,
    ) -> None:
        self.running = 0
        """Pieces of work at the worker."""
        self.aside: dict[Key, None] = {}
        """Stuck forwards, the oldest first: their gradient may still come, but they do not count."""
        self.waits_for_older = waits_for_older
        self._queue = queue
        self._may_fold = may_fold
        self._may_begin = may_begin
        self._forwards: list[_Forward[Key]] = []
        """The latest attempts first: nobody may be waiting for the tasks that they replace."""
        self._backwards: deque[Key] = deque()
        self._in_flight: dict[Key, LossDistance] = {}
        """Forwards that wait for their gradient, also those set aside."""
        self._closed = False
        queue.enter(self)

    def close(self) -> None:
        """Begin nothing any more."""
        self._closed = True

    def leave(self) -> None:
        """The step is over: nobody waits for work of it that is still at the worker."""
        self._queue.leave(self)

    def ready_forward(self, key: Key, reach: LossDistance, *, train: bool, attempt: int = 0) -> None:
        """The input of `key` is here."""
        bisect.insort_right(
            self._forwards, _Forward(key, reach, train, attempt), key=lambda one: -one.attempt
        )

    def moved(self, key: Key, hops_after: int) -> None:
        """`key` goes another way, with `hops_after` hops after this one."""
        if key in self._in_flight:
            self._in_flight[key] = self._in_flight[key]._replace(hops_after=hops_after)
        self._forwards = [
            one._replace(reach=one.reach._replace(hops_after=hops_after)) if one.key == key else one
            for one in self._forwards
        ]

    def again(self, key: Key, attempt: int) -> None:
        """`key` is handed out again; moves it up if it has not begun."""
        for one in [one for one in self._forwards if one.key == key]:
            self.withdraw(key)
            self.ready_forward(key, one.reach, train=one.train, attempt=attempt)

    def withdraw(self, key: Key) -> None:
        """Remove the forward of `key`, which has not begun."""
        self._forwards = [one for one in self._forwards if one.key != key]

    def ready_backward(self, key: Key) -> None:
        """The output gradient of `key` is here, or it ended in the loss."""
        self._backwards.append(key)

    def finished(self, key: Key) -> None:
        """`key` has had its backward, or needs none any more."""
        self._in_flight.pop(key, None)
        self.aside.pop(key, None)

    @property
    def held(self) -> int:
        """Number of forwards that wait for their gradient, also those set aside."""
        return len(self._in_flight)

    def in_flight(self, reach: LossDistance) -> int:
        """Forwards within `reach` that wait for their gradient and were not set aside."""
        return sum(other.within(reach) for key, other in self._in_flight.items() if key not in self.aside)

    def next(self) -> ScheduledWork[Key] | None:
        """The next piece of work, which stays in the list; None if there is none."""
        if self._closed:
            return None
        if self._backwards and self._may_fold():
            return ScheduledWork(self._backwards[0], backward=True)
        room: dict[LossDistance, bool] = {}
        for one in self._forwards:
            if one.train and one.reach not in room:
                room[one.reach] = self._queue.may_begin(self, one.reach)
            if (not one.train or room[one.reach]) and self._may_begin(one.key):
                return ScheduledWork(one.key, backward=False)
        return None

    def begin(self) -> ScheduledWork[Key] | None:
        """Take the next piece of work off the list; None if it is not this step's turn at the worker."""
        turn = self._queue.turn()
        if turn is None or turn[0] is not self:
            return None
        work = turn[1]
        if work.backward:
            self._backwards.remove(work.key)
        else:
            begun = next(one for one in self._forwards if one.key == work.key)
            self.withdraw(work.key)
            if begun.train:
                self._in_flight[work.key] = begun.reach
        self.running += 1
        return work

    def waits(self, counts: Callable[[Key], bool]) -> bool:
        """Whether work is ready that could begin: backwards, or forwards that `counts` accepts."""
        if self._closed:
            return False
        return bool(self._backwards) or any(counts(one.key) for one in self._forwards)


DEPTH = 2
"""Pieces of work at the worker at once: one that runs and one that waits, so that it never idles between."""


class WorkerQueue:
    """The steps that share a worker.

    `window`: bounds the forwards that wait for their gradient, and says how many devices work; None: as many
    as 1F1B has, and one.
    """

    def __init__(self, window: InFlightWindow | None = None) -> None:
        self._window = window or InFlightWindow()
        self._steps: list[Schedule[Any]] = []

    def enter(self, step: Schedule[Any]) -> None:
        """`step` begins: it is younger than all others here."""
        self._steps.append(step)

    def leave(self, step: Schedule[Any]) -> None:
        """`step` is over."""
        self._steps = [one for one in self._steps if one is not step]

    def may_begin(self, step: Schedule[Any], reach: LossDistance) -> bool:
        """Whether one more forward of `step` may wait for its gradient.

        Those of younger steps that wait for `step` itself take no room from it.
        """
        count, younger = 0, False
        for one in self._steps:
            count += 0 if younger and one.waits_for_older else one.in_flight(reach)
            younger = younger or one is step
        return count < self._window.depth(reach.hops_after)

    def may_set_aside(self, reach: LossDistance) -> bool:
        """Whether a stuck forward may be kept besides: as many again, and in all what memory allows."""
        aside, held = sum(len(one.aside) for one in self._steps), sum(one.held for one in self._steps)
        return aside < self._window.depth(reach.hops_after) and held < self._window.most

    def turn(self) -> tuple[Schedule[Any], ScheduledWork[Any]] | None:
        """The step whose work comes next, and that work; None if there is none, or the worker has enough."""
        if sum(one.running for one in self._steps) >= DEPTH + self._window.devices - 1:
            return None
        forward = None
        for one in self._steps:
            work = one.next()
            if work is not None and work.backward:
                return one, work
            if work is not None and forward is None:
                forward = one, work
        return forward

    def turns(self) -> Iterator[Schedule[Any]]:
        """Schedules that may give the worker more work, one after another until there is none.

        The caller lets each dispatch before it takes the next: this changes whose turn it is.
        """
        while (turn := self.turn()) is not None:
            yield turn[0]
