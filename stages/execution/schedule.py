"""1F1B: what a holder's worker does next.

Pure. Backward goes first, because it frees memory and lets the peers before us go on; forwards start only while few
enough of them wait for their gradient (window.py), of all steps under way (bench.py). Only work at most as far from the loss counts against the bound: what waits for a peer further
on must never block that peer's own way to the loss, or a route that passes a holder twice could wait for itself.
Evaluation forwards leave nothing behind and are not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from hetpeer.stages.execution.window import shortest

Key = TypeVar("Key", bound=Hashable)


class Work(NamedTuple, Generic[Key]):
    """The next piece of work: `backward` of `key`, or its forward."""

    key: Key
    backward: bool


class Schedule(Generic[Key]):
    """Ready work of one step, in the order in which it is to be done."""

    def __init__(self, may_begin: Callable[[int], bool] | None = None) -> None:
        """`may_begin`: whether one more forward with so many hops after it may wait for its gradient; None: by the depth of 1F1B."""
        self._may_begin = may_begin or (lambda hops_after: self.in_flight(hops_after) < shortest(hops_after))
        self._forwards: deque[tuple[Key, int, bool]] = deque()
        self._backwards: deque[Key] = deque()
        self._in_flight: dict[Key, int] = {}
        """Forwards that wait for their gradient → hops after them."""
        self._closed = False

    def close(self) -> None:
        """Nothing is begun any more."""
        self._closed = True

    def ready_forward(self, key: Key, hops_after: int, *, train: bool) -> None:
        """`key`'s input is here; `hops_after` hops follow this one on its route."""
        self._forwards.append((key, hops_after, train))

    def moved(self, key: Key, hops_after: int) -> None:
        """`key` goes another way, with so many hops after this one."""
        if key in self._in_flight:
            self._in_flight[key] = hops_after
        self._forwards = deque(
            (other, hops_after if other == key else hops, train) for other, hops, train in self._forwards
        )

    def withdraw(self, key: Key) -> None:
        """The forward of `key`, which was not begun, is not to be done here."""
        self._forwards = deque(entry for entry in self._forwards if entry[0] != key)

    def ready_backward(self, key: Key) -> None:
        """`key`'s output gradient is here (or it ended in the loss)."""
        self._backwards.append(key)

    def finished(self, key: Key) -> None:
        """`key` has had its backward, or needs none any more."""
        self._in_flight.pop(key, None)

    def in_flight(self, hops_after: int) -> int:
        """Forwards with so many hops after them at most that wait for their gradient."""
        return sum(hops <= hops_after for hops in self._in_flight.values())

    def next(self, *, may_fold: bool, may_leave: Callable[[Key], bool] = lambda _: True) -> Work[Key] | None:
        """The next piece of work, which stays on the list. `may_fold`: whether a slot has room for a backward; `may_leave`:
        whether the link on which a forward's output is to go takes it.
        """
        if self._closed:
            return None
        if self._backwards and may_fold:
            return Work(self._backwards[0], backward=True)
        for key, hops_after, train in self._forwards:
            if (not train or self._may_begin(hops_after)) and may_leave(key):
                return Work(key, backward=False)
        return None

    def begun(self, work: Work[Key]) -> None:
        """Take `work` off the list."""
        if work.backward:
            self._backwards.remove(work.key)
            return
        hops_after, train = next((hops, train) for key, hops, train in self._forwards if key == work.key)
        self.withdraw(work.key)
        if train:
            self._in_flight[work.key] = hops_after

    @property
    def waiting(self) -> int:
        """Pieces of work that are ready, to be begun as soon as they may."""
        return 0 if self._closed else len(self._forwards) + len(self._backwards)
