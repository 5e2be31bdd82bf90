"""1F1B: what a holder's worker does next.

Pure. Backward goes first, because it frees memory and lets the peers before us go on; forwards start only while few
enough of them wait for their gradient (in_flight.py), of all steps under way (worker_queue.py). What waits for a peer further
on must never block that peer's own way to the loss, or a route that passes a holder twice could wait for itself. So only what is `within` reach counts
against the bound of a forward: at most as many blocks from the loss, and at most as many hops. Hops alone would not do: the way
further on may have been changed since, and they need not fall along a route then.
Evaluation forwards leave nothing behind and are not counted.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Collection, Hashable
from typing import Generic, NamedTuple, TypeVar

from hetpeer.stages.pipeline.in_flight import shortest

Key = TypeVar("Key", bound=Hashable)


class LossDistance(NamedTuple):
    """How far a forward is from the loss: `blocks_left` with its own, `hops_after` its own."""

    blocks_left: int
    hops_after: int

    def within(self, other: LossDistance) -> bool:
        """Whether this one is no farther from the loss than `other`, by either."""
        return self.blocks_left <= other.blocks_left and self.hops_after <= other.hops_after


class ScheduledWork(NamedTuple, Generic[Key]):
    """The next piece of work: `backward` of `key`, or its forward."""

    key: Key
    backward: bool


class _Forward(NamedTuple, Generic[Key]):
    """One that is ready."""

    key: Key
    reach: LossDistance
    train: bool
    attempt: int


class Schedule(Generic[Key]):
    """Ready work of one step, in the order in which it is to be done."""

    def __init__(self, may_begin: Callable[[LossDistance], bool] | None = None) -> None:
        """`may_begin`: whether one more forward so far from the loss may wait for its gradient; None: by the depth of 1F1B."""
        self._may_begin = may_begin or (lambda reach: self.in_flight(reach) < shortest(reach.hops_after))
        self._forwards: list[_Forward[Key]] = []
        """The latest attempts first: what they take the place of may be waited for by nobody."""
        self._backwards: deque[Key] = deque()
        self._in_flight: dict[Key, LossDistance] = {}
        """Forwards that wait for their gradient."""
        self._aside: dict[Key, None] = {}
        """Those of them that got stuck, and do not count: their gradient may come yet."""
        self._closed = False

    def close(self) -> None:
        """Nothing is begun any more."""
        self._closed = True

    def ready_forward(self, key: Key, reach: LossDistance, *, train: bool, attempt: int = 0) -> None:
        """`key`'s input is here."""
        bisect.insort_right(
            self._forwards, _Forward(key, reach, train, attempt), key=lambda one: -one.attempt
        )

    def moved(self, key: Key, hops_after: int) -> None:
        """`key` goes another way, with so many hops after this one."""
        if key in self._in_flight:
            self._in_flight[key] = self._in_flight[key]._replace(hops_after=hops_after)
        self._forwards = [
            one._replace(reach=one.reach._replace(hops_after=hops_after)) if one.key == key else one
            for one in self._forwards
        ]

    def again(self, key: Key, attempt: int) -> None:
        """`key`, if it is not begun, is handed out again."""
        for one in [one for one in self._forwards if one.key == key]:
            self.withdraw(key)
            self.ready_forward(key, one.reach, train=one.train, attempt=attempt)

    def withdraw(self, key: Key) -> None:
        """The forward of `key`, which was not begun, is not to be done here."""
        self._forwards = [one for one in self._forwards if one.key != key]

    def ready_backward(self, key: Key) -> None:
        """`key`'s output gradient is here (or it ended in the loss)."""
        self._backwards.append(key)

    def finished(self, key: Key) -> None:
        """`key` has had its backward, or needs none any more."""
        self._in_flight.pop(key, None)
        self._aside.pop(key, None)

    def set_aside(self, key: Key) -> None:
        """`key` waits for its gradient, and takes nobody's place by that."""
        self._aside[key] = None

    @property
    def aside(self) -> Collection[Key]:
        """Those that were set aside, the first one first."""
        return self._aside.keys()

    @property
    def held(self) -> int:
        """All that wait for their gradient."""
        return len(self._in_flight)

    def in_flight(self, reach: LossDistance) -> int:
        """Forwards within `reach` that wait for their gradient, and were not set aside."""
        return sum(other.within(reach) for key, other in self._in_flight.items() if key not in self._aside)

    def has_room(self, reach: LossDistance) -> bool:
        """Whether one more forward so far from the loss may wait for its gradient."""
        return self._may_begin(reach)

    def next(
        self, *, may_fold: bool, may_begin: Callable[[Key], bool] = lambda _: True
    ) -> ScheduledWork[Key] | None:
        """The next piece of work, which stays on the list. `may_fold`: whether a slot has room for a backward; `may_begin`:
        whether what a forward needs is here, and the link on which its output is to go takes that.
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
        """Take `work` off the list."""
        if work.backward:
            self._backwards.remove(work.key)
            return
        begun = next(one for one in self._forwards if one.key == work.key)
        self.withdraw(work.key)
        if begun.train:
            self._in_flight[work.key] = begun.reach

    def waits(self, counts: Callable[[Key], bool]) -> bool:
        """Whether work is ready, to be begun as soon as it may: backwards, or forwards that count."""
        if self._closed:
            return False
        return bool(self._backwards) or any(counts(one.key) for one in self._forwards)
