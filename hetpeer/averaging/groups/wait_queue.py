"""A queue of workers that are ready to average, and the moment when they become a group. Pure."""

from __future__ import annotations

import math

from hetpeer.averaging.groups.sync_graph import SyncGraph
from hetpeer.averaging.groups.wait_window import WaitWindow


class WaitQueue:
    """Workers arrive one by one; when the window that the first one opened is over, those that are here are
    due.

    They are `valid`, and may go, if the span of `graph` with them connects everybody. That is kept up to date
    with each arrival.
    """

    def __init__(self, graph: SyncGraph, window: WaitWindow) -> None:
        self.graph = graph
        self._window = window
        self._ready: dict[str, None] = {}
        self._touched: set[str] = set()
        self._due_at = math.inf

    def arrive(self, worker: str, now: float) -> None:
        """`worker` is ready; if it is here already or nobody knows it, nothing changes."""
        if worker in self._ready or worker not in self.graph.members:
            return
        self._window.arrived(worker, now)
        if self.is_empty:
            self._due_at = now + self._window.seconds(worker, len(self.graph.members))
        self._ready[worker] = None
        self._touched.add(self.graph.part(worker))

    def join(self, worker: str, like: str | None) -> None:
        """`worker` takes part from now on, from the state of `like`."""
        self.graph.join(worker, like)
        self._count()

    def averaged(self, seconds: float) -> None:
        """A group has averaged, and it took so long."""
        self._window.averaged(seconds)

    def leave(self, worker: str) -> None:
        """`worker` has left."""
        self.graph.leave(worker)
        self._window.left(worker)
        self._ready.pop(worker, None)
        if self.is_empty:
            self._due_at = math.inf
        self._count()

    def _count(self) -> None:
        self._touched = {self.graph.part(worker) for worker in self._ready}

    @property
    def due_at(self) -> float:
        """When the window ends; infinite if nobody waits, in the past while those who wait may not go."""
        return self._due_at

    def is_due(self, now: float) -> bool:
        """Whether nobody needs to be waited for any more, except for the graph's sake."""
        return not self.is_empty and (now >= self._due_at or len(self._ready) == len(self.graph.members))

    @property
    def connects(self) -> bool:
        """Whether those who wait, as a group, connect all that the graph has left apart."""
        return len(self._touched) == self.graph.parts

    @property
    def valid(self) -> bool:
        """Whether those who wait may go by themselves."""
        return not self.graph.binding or self.connects

    @property
    def is_empty(self) -> bool:
        """Whether no worker waits."""
        return not self._ready

    def form(self, now: float) -> tuple[str, ...]:
        """Empty the queue; its workers are a group."""
        group = tuple(sorted(self._ready))
        self._ready, self._touched, self._due_at = {}, set(), math.inf
        self._window.formed(group, len(self.graph.members), now)
        return group
