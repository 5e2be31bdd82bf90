"""1F1B: the order of a holder's work in one step.

Pure. Backwards go first, because they free memory and let earlier peers go on. Forwards begin only while few
enough of them wait for their gradient (in_flight.py), over all steps under way (worker_queue.py). A task that
waits for a later peer must not block that peer's own way to the loss, or a route that passes a holder twice
could wait for itself. So a forward's bound counts only tasks `within` its distance: at most as many blocks
from the loss, and at most as many hops. Hops alone would not do: the rest of a route may have changed, and
then they need not fall along it. Evaluation forwards keep nothing and are not counted.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Collection, Hashable
from typing import Generic, NamedTuple, TypeVar

from hetpeer.stages.pipeline.in_flight import shortest

Key = TypeVar("Key", bound=Hashable)


class LossDistance(NamedTuple):
    """A forward's distance from the loss: `blocks_left` including its own, `hops_after` its own."""

    blocks_left: int
    hops_after: int

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
    """Ready work of one step, in the order in which to do it."""

    def __init__(self, may_begin: Callable[[LossDistance], bool] | None = None) -> None:
        """`may_begin`: whether one more forward at a distance may wait for its gradient; None: by the depth
        of 1F1B.
        """
        self._may_begin = may_begin or (lambda reach: self.in_flight(reach) < shortest(reach.hops_after))
        self._forwards: list[_Forward[Key]] = []
        """The latest attempts first: nobody may be waiting for the tasks that they replace."""
        self._backwards: deque[Key] = deque()
        self._in_flight: dict[Key, LossDistance] = {}
        """Forwards that wait for their gradient."""
        self._aside: dict[Key, None] = {}
        """Stuck ones of them, which do not count: their gradient may still come."""
        self._closed = False

    def close(self) -> None:
        """Begin nothing any more."""
        self._closed = True

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
        self._aside.pop(key, None)

    def set_aside(self, key: Key) -> None:
        """`key` goes on waiting for its gradient, but no longer counts."""
        self._aside[key] = None

    @property
    def aside(self) -> Collection[Key]:
        """The keys that were set aside, the oldest first."""
        return self._aside.keys()

    @property
    def held(self) -> int:
        """Number of forwards that wait for their gradient."""
        return len(self._in_flight)

    def in_flight(self, reach: LossDistance) -> int:
        """Forwards within `reach` that wait for their gradient and were not set aside."""
        return sum(other.within(reach) for key, other in self._in_flight.items() if key not in self._aside)

    def has_room(self, reach: LossDistance) -> bool:
        """Whether one more forward at that distance may wait for its gradient."""
        return self._may_begin(reach)

    def next(
        self, *, may_fold: bool, may_begin: Callable[[Key], bool] = lambda _: True
    ) -> ScheduledWork[Key] | None:
        """The next piece of work, which stays in the list; None if there is none.

        `may_fold`: whether a slot has room for a backward. `may_begin`: whether a forward's inputs are here
        and the link for its output has room.
        """
        if self._closed:
            return None
        if self._backwards and may_fold:
            return ScheduledWork(self._backwards[0], backward=True)
        for one in self._forwards:
            if (not one.train or self._may_begin(one.reach)) and may_begin(one.key):
                return ScheduledWork(one.key, backward=False)
        return None

    def begun(self, work: ScheduledWork[Key]) -> None:
        """Remove `work` from the list, since it begins."""
        if work.backward:
            self._backwards.remove(work.key)
            return
        begun = next(one for one in self._forwards if one.key == work.key)
        self.withdraw(work.key)
        if begun.train:
            self._in_flight[work.key] = begun.reach

    def waits(self, counts: Callable[[Key], bool]) -> bool:
        """Whether work is ready that could begin: backwards, or forwards that `counts` accepts."""
        if self._closed:
            return False
        return bool(self._backwards) or any(counts(one.key) for one in self._forwards)
