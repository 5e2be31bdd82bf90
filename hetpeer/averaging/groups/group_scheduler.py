"""The group scheduler: decides which workers average together, and when. The interface, and hetpeer's own
rules.

Pure. Docs: averaging.md, "Who averages with whom".
Source: SDPipe (Miao et al., VLDB 2023), 3.2-3.4, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from hetpeer.averaging.groups.sync_graph import SyncGraph
from hetpeer.averaging.groups.wait_queue import WaitQueue
from hetpeer.averaging.groups.wait_window import WaitWindow


@dataclass(frozen=True, slots=True)
class Group:
    """Workers that average `stage` now. Numbers rise by one with each group of a stage."""

    stage: int
    number: int
    members: tuple[str, ...]


class GroupScheduler(Protocol):
    """Arrivals and departures go in, groups come out, each once. Times are seconds of one clock, and never
    fall.
    """

    def ready(self, stage: int, worker: str, now: float) -> list[Group]:
        """`worker` has updated `stage`, and waits until its group has averaged it."""

    def joined(self, worker: str, like: str | None, now: float) -> list[Group]:
        """`worker` takes part from now on, from the state of `like`, or from the initial state (None)."""

    def left(self, worker: str, now: float) -> list[Group]:
        """`worker` has left."""

    def averaged(self, seconds: float) -> None:
        """A group of several has averaged, and it took so long."""

    def tick(self, now: float) -> list[Group]:
        """Time has passed."""

    @property
    def due_at(self) -> float:
        """When `tick` is needed next; infinite if it is not, in the past while workers wait for others."""


class GroupPipelines:
    """Whole pipelines wait in one queue: a worker is ready when all its `stages` are, and each group connects
    the span.

    So no worker waits for two things at a time, and no group goes unchecked.
    """

    def __init__(self, stages: int, workers: Iterable[str], span: int | None, window: WaitWindow) -> None:
        self._stages = stages
        self._line = WaitQueue(SyncGraph(span, workers), window)
        self._done: dict[str, set[int]] = {}
        self._number = 0

    def ready(self, stage: int, worker: str, now: float) -> list[Group]:
        """`worker` has one more stage ready at `now`; see `GroupScheduler.ready`."""
        done = self._done.setdefault(worker, set())
        done.add(stage)
        if len(done) < self._stages:
            return []
        self._line.arrive(worker, now)
        return self.tick(now)

    def joined(self, worker: str, like: str | None, now: float) -> list[Group]:
        """See `GroupScheduler.joined`."""
        self._line.join(worker, like)
        return self.tick(now)

    def left(self, worker: str, now: float) -> list[Group]:
        """See `GroupScheduler.left`."""
        self._done.pop(worker, None)
        self._line.leave(worker)
        return self.tick(now)

    def averaged(self, seconds: float) -> None:
        """See `GroupScheduler.averaged`."""
        self._line.averaged(seconds)

    def tick(self, now: float) -> list[Group]:
        """See `GroupScheduler.tick`."""
        line = self._line
        if not (line.is_due(now) and line.valid):
            return []
        members = line.form(now)
        line.graph.add(members)
        self._number += 1
        for member in members:
            del self._done[member]
        return [Group(stage, self._number, members) for stage in range(self._stages)]

    @property
    def due_at(self) -> float:
        """See `GroupScheduler.due_at`."""
        return self._line.due_at
