"""The worker's room at one holder, shared by the steps that are under way there.

Pure. Only so many pieces of work are at the worker at a time, whatever step they are of; which comes next is decided among all of them: backwards
first, because they free memory and let the peers before us go on, and the older step first, because it is to be committed first. Forwards of
all steps together are bounded by the window (schedule_1f1b.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from hetpeer.stages.pipeline.in_flight import InFlightWindow
from hetpeer.stages.pipeline.schedule_1f1b import LossDistance

DEPTH = 2
"""Pieces of work handed to the worker at once: one that runs and one that waits, so that it never idles between."""


class Bidder(Protocol):
    """A step under way."""

    @property
    def running(self) -> int:
        """Its pieces of work at the worker."""

    def in_flight(self, reach: LossDistance) -> int:
        """Its forwards within `reach` that wait for their gradient."""

    @property
    def held(self) -> int:
        """Its forwards that wait for their gradient, those that were set aside included."""

    @property
    def aside(self) -> int:
        """Those alone."""

    def bid(self) -> bool | None:
        """Whether the next piece of work that it could begin is a backward; None: there is none."""


class WorkerQueue:
    """`window`: how many forwards may wait for their gradient; None: as many as 1F1B has."""

    def __init__(self, window: InFlightWindow | None = None) -> None:
        self._window = window or InFlightWindow()
        self._steps: list[Bidder] = []

    def enter(self, step: Bidder) -> None:
        """`step` begins: it is younger than all that are here."""
        self._steps.append(step)

    def leave(self, step: Bidder) -> None:
        """`step` is over; the worker may still do what it was given, which nobody waits for."""
        self._steps = [one for one in self._steps if one is not step]

    def may_begin(self, reach: LossDistance) -> bool:
        """Whether one more forward may wait for its gradient."""
        return sum(one.in_flight(reach) for one in self._steps) < self._window.depth(reach.hops_after)

    def may_set_aside(self, reach: LossDistance) -> bool:
        """Whether one that got stuck may be kept beside those: as many more, and no more in all than there is memory for."""
        aside, held = sum(one.aside for one in self._steps), sum(one.held for one in self._steps)
        return aside < self._window.depth(reach.hops_after) and held < self._window.most

    def turn(self) -> Bidder | None:
        """The step whose work comes next; None while the worker has enough, or nobody has any."""
        if sum(one.running for one in self._steps) >= DEPTH:
            return None
        forwards = None
        for one in self._steps:
            backward = one.bid()
            if backward:
                return one
            if backward is not None and forwards is None:
                forwards = one
        return forwards

    def turns(self) -> Iterator[Bidder]:
        """What has happened in one step may make it another one's turn: who is to resume before the next is asked for, and so on."""
        while (one := self.turn()) is not None:
            yield one
