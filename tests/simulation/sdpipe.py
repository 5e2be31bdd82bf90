"""SDPipe's own rules, for comparison: a wait queue for each stage, and one stage at a time may gather
everybody.

Pure. `Paper` is the paper's Algorithm 2 with 3.4; `Artifact` what its code does
(ps-lite/src/preduce_handler.cc and python/hetu/preduce.py). Both let groups go unchecked while another stage
gathers everybody: docs/averaging.md says why ours do not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from hetpeer.averaging.groups.group_scheduler import Group, SyncGraph, WaitQueue
from hetpeer.averaging.groups.wait_window import LONGER, SHORTER, WaitWindow

ENDLESS = sys.maxsize
ROUNDS = 10
"""The artifact's ssp_bound: updates of each worker, on average, from one check to the next."""
PAIRS_ABOVE = 8
"""With more workers the artifact cuts groups into pairs."""
START_S, LEAST_S, MOST_S = 1e-3, 1e-5, 1e-2
"""The artifact's window."""


class GroupScheduler(Protocol):
    """Arrivals and departures go in, groups come out, each once. Times: seconds of one monotonic clock."""

    def ready(self, stage: int, worker: str, now: float) -> list[Group]:
        """`worker` has updated `stage`, and waits until its group has averaged it."""

    def joined(self, worker: str, like: str | None, now: float) -> list[Group]:
        """`worker` takes part from now on, from the state of `like`, or from the initial state (None)."""

    def left(self, worker: str, now: float) -> list[Group]:
        """`worker` has left."""

    def averaged(self, seconds: float) -> None:
        """A group of several has averaged, which took `seconds`."""

    def tick(self, now: float) -> list[Group]:
        """Time has passed."""

    @property
    def due_at(self) -> float:
        """Time of the next `tick`; infinite if none is needed, past while workers wait for others."""


class Bounded(WaitWindow):
    """The artifact's window: doubled after a group of one, a tenth less after any other, within bounds in
    seconds.
    """

    def __init__(self, start: float, least: float, most: float) -> None:
        super().__init__(start)
        self._least, self._most = least, most

    def formed(self, group: Collection[str], present: int, now: float) -> None:
        """A group has formed: lengthen or shorten the window."""
        self._seconds = min(
            max(self._seconds * (LONGER if len(group) < 2 else SHORTER), self._least), self._most
        )


class _Staged:
    """Common part of both: the wait queues, and the stage that gathers everybody."""

    def __init__(
        self, stages: int, workers: Iterable[str], span: int | None, window: Callable[[], WaitWindow]
    ) -> None:
        present = tuple(workers)
        self._lines = [WaitQueue(SyncGraph(span, present), window()) for _ in range(stages)]
        self._gathering: int | None = None
        self._numbers = [0] * stages

    def ready(self, stage: int, worker: str, now: float) -> list[Group]:
        self._lines[stage].arrive(worker, now)
        return self.tick(now)

    def joined(self, worker: str, like: str | None, now: float) -> list[Group]:
        for line in self._lines:
            line.join(worker, like)
        return self.tick(now)

    def left(self, worker: str, now: float) -> list[Group]:
        for line in self._lines:
            line.leave(worker)
        return self.tick(now)

    def averaged(self, seconds: float) -> None:
        """Ignore the seconds of an averaging, as SDPipe does."""

    def tick(self, now: float) -> list[Group]:
        groups = []
        for stage, line in enumerate(self._lines):
            if line.is_due(now) and self._may_go(stage, line):
                groups += self._form(stage, line, now)
        return groups

    @property
    def due_at(self) -> float:
        return min(line.due_at for line in self._lines)

    def _may_go(self, stage: int, line: WaitQueue) -> bool:
        """Whether the workers that wait in `line` may average, as they are due."""
        raise NotImplementedError

    def _form(self, stage: int, line: WaitQueue, now: float) -> list[Group]:
        members = line.form(now)
        line.graph.add(members)
        if self._gathering == stage:
            self._gathering = None
        return [self._numbered(stage, members)]

    def _numbered(self, stage: int, members: tuple[str, ...]) -> Group:
        self._numbers[stage] += 1
        return Group(stage, self._numbers[stage], members)


class Paper(_Staged):
    """Every group is checked, unless another stage is gathering everybody."""

    def _may_go(self, stage: int, line: WaitQueue) -> bool:
        if line.valid:
            return True
        if self._gathering is None:
            self._gathering = stage
        return self._gathering != stage


class Artifact(_Staged):
    """One group in ten updates of each worker is checked, against all since the last check; no stage gathers
    any more once a worker has gone.
    """

    def __init__(self, stages: int, workers: Iterable[str]) -> None:
        super().__init__(stages, workers, ENDLESS, lambda: Bounded(START_S, LEAST_S, MOST_S))
        self._updates = [0] * stages
        self._complete = True

    def ready(self, stage: int, worker: str, now: float) -> list[Group]:
        line = self._lines[stage]
        due = self._updates[stage] >= ROUNDS * len(line.graph.members)
        if line.is_empty and due and self._complete and self._gathering is None:
            self._gathering = stage
        return super().ready(stage, worker, now)

    def left(self, worker: str, now: float) -> list[Group]:
        self._complete, self._gathering = False, None
        return super().left(worker, now)

    def _may_go(self, stage: int, line: WaitQueue) -> bool:
        return self._gathering != stage or line.connects

    def _form(self, stage: int, line: WaitQueue, now: float) -> list[Group]:
        checked = self._gathering == stage
        (whole,) = super()._form(stage, line, now)
        self._updates[stage] += len(whole.members)
        if checked:
            self._updates[stage] = 0
            line.graph.forget()
        if checked or len(line.graph.members) <= PAIRS_ABOVE:
            return [whole]
        pairs = [whole.members[at : at + 2] for at in range(0, len(whole.members), 2)]
        self._numbers[stage] -= 1
        return [self._numbered(stage, pair) for pair in pairs]
