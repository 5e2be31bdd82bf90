"""The queue at one holder's worker, shared by the steps under way there.

Pure. Only DEPTH pieces of work are at the worker at a time, of whatever step. The next is chosen among all
steps: backwards first, because they free memory and let earlier peers go on, and older steps first, because
they are committed first. The window (in_flight.py) bounds the forwards of all steps together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from hetpeer.stages.pipeline.in_flight import InFlightWindow
from hetpeer.stages.pipeline.schedule_1f1b import LossDistance

DEPTH = 2
"""Pieces of work at the worker at once: one that runs and one that waits, so that it never idles between."""


class Bidder(Protocol):
    """A step under way."""

    @property
    def running(self) -> int:
        """Its pieces of work at the worker."""

    def in_flight(self, reach: LossDistance) -> int:
        """Its forwards within `reach` that wait for their gradient."""

    @property
    def held(self) -> int:
        """Its forwards that wait for their gradient, including those set aside."""

    @property
    def aside(self) -> int:
        """Its forwards that were set aside."""

    def bid(self) -> bool | None:
        """Whether the next piece of work that it could begin is a backward; None: there is none."""


class WorkerQueue:
    """`window`: bounds the forwards that wait for their gradient; None: as many as 1F1B has."""

    def __init__(self, window: InFlightWindow | None = None) -> None:
        self._window = window or InFlightWindow()
        self._steps: list[Bidder] = []

    def enter(self, step: Bidder) -> None:
        """`step` begins: it is younger than all others here."""
        self._steps.append(step)

    def leave(self, step: Bidder) -> None:
        """`step` is over; nobody waits for work of it that is still at the worker."""
        self._steps = [one for one in self._steps if one is not step]

    def may_begin(self, reach: LossDistance) -> bool:
        """Whether one more forward may wait for its gradient."""
        return sum(one.in_flight(reach) for one in self._steps) < self._window.depth(reach.hops_after)

    def may_set_aside(self, reach: LossDistance) -> bool:
        """Whether a stuck forward may be kept in addition: as many again, and in all no more than memory
        allows.
        """
        aside, held = sum(one.aside for one in self._steps), sum(one.held for one in self._steps)
        return aside < self._window.depth(reach.hops_after) and held < self._window.most

    def turn(self) -> Bidder | None:
        """The step whose work comes next; None while the worker has enough, or there is none."""
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
        """Steps that are to resume, one after the other: an event in one step may make it another
        one's turn.
        """
        while (one := self.turn()) is not None:
            yield one
