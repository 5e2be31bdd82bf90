"""The group scheduler: decides which workers average together, and when.

Pure. The sync graph says which workers have shared parameters in the last groups, and whether it stays
connected. The last P groups count, with P = `span` · members, so that more members do not make all wait for
the slowest more often. Of the edges of the last P - 1 groups only the spanning forest of the newest ones is
kept: an edge that newer ones make redundant is not missed when it expires (a maximum spanning forest by age,
Kruskal's algorithm). Docs: averaging.md, "Who averages with whom".
Source: SDPipe (Miao et al., VLDB 2023), 3.2-3.4, Algorithm 2.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hetpeer.averaging.groups.wait_window import WaitWindow


class _Edge(NamedTuple):
    number: int
    """Number of the group that the edge comes from."""
    one: str
    other: str


class SyncGraph:
    """The graph of `members`: any P = `span` · members consecutive groups must connect them.

    That is SDPipe's Assumption 1, with P per worker as in its artifact. `span` None: no group is checked.
    Edges of a member that has left connect nobody any more. A group that is too old stays too old when there
    are more members.
    """

    def __init__(self, span: int | None, members: Iterable[str]) -> None:
        if span is not None and span < 1:
            raise ValueError(f"a span of {span} groups")
        self._span = span
        self._formed, self._expired = 0, -1
        """Groups up to this number do not count for the next one any more."""
        self._groups: deque[tuple[int, frozenset[str]]] = deque()
        """(number, members) of the last P - 1 groups, and of members that have joined since; oldest first."""
        self._forest: list[_Edge] = []
        """Newest first."""
        self._root = {member: member for member in members}
        self.parts = len(self._root)
        """Into how many parts the last P - 1 groups leave the members."""

    @property
    def members(self) -> Collection[str]:
        """The members, joined and not left."""
        return self._root.keys()

    @property
    def binding(self) -> bool:
        """Whether the next group is the last of P."""
        return self._span is not None and self._formed >= self._span * len(self._root) - 1

    def part(self, member: str) -> str:
        """The representative of `member`'s connected component: the same for all of it."""
        root = self._root
        while root[member] != member:
            root[member] = member = root[root[member]]
        return member

    def add(self, group: Collection[str]) -> None:
        """Note that `group` has averaged. O(members), less if few of its edges are superfluous."""
        self._formed += 1
        if self._span is None:
            return
        self._groups.append((self._formed, frozenset(group)))
        self._expire()
        self._grow([*_star(self._formed, group), *self._forest])

    def join(self, member: str, like: str | None) -> None:
        """`member` is new and starts from the state of `like`; None: from the same as everybody."""
        if member in self._root:
            return
        self._root[member] = member
        if like is not None and like in self._root and self._span is not None:
            self._groups.append((self._formed, frozenset((member, like))))
        self._rebuild()

    def leave(self, member: str) -> None:
        """`member` has left. O(all edges of P groups)."""
        if self._root.pop(member, None) is not None:
            self._expire()
            self._rebuild()

    def forget(self) -> None:
        """Drop all edges."""
        self._formed, self._expired = 0, -1
        self._groups.clear()
        self._grow(())

    def _expire(self) -> None:
        if self._span is not None:
            self._expired = max(self._expired, self._formed - (self._span * len(self._root) - 1))
        while self._groups and self._groups[0][0] <= self._expired:
            self._groups.popleft()

    def _rebuild(self) -> None:
        present = self._root.keys()
        self._grow([e for number, group in reversed(self._groups) for e in _star(number, group & present)])

    def _grow(self, edges: Iterable[_Edge]) -> None:
        """Kruskal: of `edges`, newest first, those that still count and connect what was not connected."""
        root = self._root = {member: member for member in self._root}
        part = self.part
        forest = []
        for edge in edges:
            if edge.number <= self._expired:
                break
            one, other = part(edge.one), part(edge.other)
            if one != other:
                root[one] = other
                forest.append(edge)
        self._forest = forest
        self.parts = len(root) - len(forest)


def _star(number: int, group: Collection[str]) -> list[_Edge]:
    hub, *others = sorted(group) or [""]
    return [_Edge(number, hub, other) for other in others]


class WaitQueue:
    """Queue of the workers that wait to average. They are due when the window that the first opened is over.

    A group of the waiting workers is `valid` if the span of `graph` with it connects everybody. This is kept
    up to date with each arrival.
    """

    def __init__(self, graph: SyncGraph, window: WaitWindow) -> None:
        self.graph = graph
        self._window = window
        self._ready: dict[str, None] = {}
        self._touched: set[str] = set()
        self.due_at = math.inf
        """End of the window; infinite if nobody waits, in the past while the waiting may not form a group."""

    def arrive(self, worker: str, now: float) -> None:
        """Add `worker`, which is ready; no effect if it waits already or takes no part."""
        if worker in self._ready or worker not in self.graph.members:
            return
        self._window.arrived(worker, now)
        if self.is_empty:
            self.due_at = now + self._window.seconds(worker, len(self.graph.members))
        self._ready[worker] = None
        self._touched.add(self.graph.part(worker))

    def join(self, worker: str, like: str | None) -> None:
        """`worker` takes part from now on, from the state of `like`."""
        self.graph.join(worker, like)
        self._count()

    def averaged(self, seconds: float) -> None:
        """A group has averaged, which took `seconds`."""
        self._window.averaged(seconds)

    def leave(self, worker: str) -> None:
        """`worker` has left."""
        self.graph.leave(worker)
        self._window.left(worker)
        self._ready.pop(worker, None)
        if self.is_empty:
            self.due_at = math.inf
        self._count()

    def _count(self) -> None:
        self._touched = {self.graph.part(worker) for worker in self._ready}

    def is_due(self, now: float) -> bool:
        """Whether the window is over or all are ready; the graph may still demand more workers."""
        return not self.is_empty and (now >= self.due_at or len(self._ready) == len(self.graph.members))

    @property
    def connects(self) -> bool:
        """Whether a group of all waiting workers would connect the parts of the graph."""
        return len(self._touched) == self.graph.parts

    @property
    def valid(self) -> bool:
        """Whether the waiting workers may form a group now."""
        return not self.graph.binding or self.connects

    @property
    def is_empty(self) -> bool:
        """Whether no worker waits."""
        return not self._ready

    def form(self, now: float) -> tuple[str, ...]:
        """Empty the queue; its workers are a group."""
        group = tuple(sorted(self._ready))
        self._ready, self._touched, self.due_at = {}, set(), math.inf
        self._window.formed(group, len(self.graph.members), now)
        return group


@dataclass(frozen=True, slots=True)
class Group:
    """Workers that average `stage` now. Numbers rise by one with each group of a stage."""

    stage: int
    number: int
    members: tuple[str, ...]


class GroupPipelines:
    """Whole pipelines wait in one queue: a worker is ready when all its `stages` are, and each group connects
    the span.

    So no worker waits for two things at a time, and no group goes unchecked. Arrivals and departures go in,
    groups come out, each once. Times: seconds of one monotonic clock.
    """

    def __init__(self, stages: int, workers: Iterable[str], span: int | None, window: WaitWindow) -> None:
        self._stages = stages
        self._line = WaitQueue(SyncGraph(span, workers), window)
        self._done: dict[str, set[int]] = {}
        self._number = 0

    def ready(self, stage: int, worker: str, now: float) -> list[Group]:
        """`worker` has updated `stage`, and waits until its group has averaged it."""
        done = self._done.setdefault(worker, set())
        done.add(stage)
        if len(done) < self._stages:
            return []
        self._line.arrive(worker, now)
        return self.tick(now)

    def joined(self, worker: str, like: str | None, now: float) -> list[Group]:
        """`worker` takes part from now on, from the state of `like`, or from the initial state (None)."""
        self._line.join(worker, like)
        return self.tick(now)

    def left(self, worker: str, now: float) -> list[Group]:
        """`worker` has left."""
        self._done.pop(worker, None)
        self._line.leave(worker)
        return self.tick(now)

    def averaged(self, seconds: float) -> None:
        """A group of several has averaged, which took `seconds`."""
        self._line.averaged(seconds)

    def tick(self, now: float) -> list[Group]:
        """Time has passed."""
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
        """Time of the next `tick`; infinite if none is needed, past while workers wait for others."""
        return self._line.due_at
