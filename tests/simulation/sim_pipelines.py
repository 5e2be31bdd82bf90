"""Pipelines that average by the group scheduler, in virtual time: 1F1B in each, the real scheduler over all
of them.

What is modelled is SDPipe's setting (Miao et al., VLDB 2023, section 5): N pipelines of M stages; a stage
computes its microbatches in 1F1B order (M - j forwards first, then a backward and a forward in turn), updates
at the end of the iteration, is ready, and begins the next one when its group has averaged. Sends take no time
of a stage. A straggler sleeps before an iteration.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hetpeer.averaging.groups.group_scheduler import Group
from hetpeer.stages.planning.uplinks import Timeline
from tests.simulation.sdpipe import GroupScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSetting:
    """Shape and pace of the pipelines; times in seconds."""

    pipelines: int = 4
    stages: int = 4
    microbatches: int = 8
    stage_s: float = 0.1
    """Seconds of computing of a stage in an iteration; a third of it is the forward."""
    hop_s: float = 0.002
    """Seconds from one stage to the next."""
    average_s: Callable[[int], float] = field(default=lambda size: 0.001 if size > 1 else 0.0)
    """Size of a group → seconds of its averaging."""
    sleep_s: float = 0.0
    chance: float = 0.1
    """Chance that a stage sleeps before an iteration."""
    tick_s: float = 0.0
    """Seconds between two looks at the clock; 0: one when each wait window ends."""


class SimPipelines:
    """N pipelines on one `timeline`. `formed` is told each group."""

    def __init__(
        self,
        setting: PipelineSetting,
        scheduler: GroupScheduler,
        seed: int,
        formed: Callable[[Group], None] = lambda _group: None,
    ) -> None:
        self.timeline = Timeline()
        self.setting = setting
        self.iterations: dict[str, int] = {}
        """Pipeline → iterations that all its stages have computed; of those that are present."""
        self._scheduler = scheduler
        self._seed = seed
        self._formed = formed
        self._rows: dict[str, list[_Stage]] = {}
        for name in names(setting.pipelines):
            self._add(name)

    def join(self, name: str, like: str) -> None:
        """One more pipeline, with the state of `like`."""
        self._add(name)
        self.iterations[name] = self.iterations[like]
        self._tell(self._scheduler.joined(name, like, self.timeline.now))

    def leave(self, name: str) -> None:
        """A pipeline leaves, in the middle of whatever it does."""
        for stage in self._rows.pop(name):
            stage.ops.clear()
        del self.iterations[name]
        self._tell(self._scheduler.left(name, self.timeline.now))

    def run(self, until: Callable[[], bool]) -> float:
        """Run until `until()` holds; return the time.

        Raises RuntimeError if nothing happens any more before that.
        """
        self.timeline.run(until)
        return self.timeline.now

    def _add(self, name: str) -> None:
        self.iterations[name] = 0
        row = self._rows[name] = []
        for _ in range(self.setting.stages):
            row.append(_Stage(self, name, row, self._seed))
        for stage in row:
            self.timeline.after(0.0, stage.begin)

    def computed(self, stage: _Stage) -> None:
        """Tell the scheduler that `stage` has finished an iteration and is ready."""
        if stage.pipeline not in self.iterations:  # gone meanwhile
            return
        if stage.number == 0:  # the last of its pipeline to be through
            self.iterations[stage.pipeline] += 1
        self._tell(self._scheduler.ready(stage.number, stage.pipeline, self.timeline.now))

    def _tell(self, groups: list[Group]) -> None:
        for group in groups:
            self._formed(group)
            took = self.setting.average_s(len(group.members))
            if len(group.members) > 1:
                self._scheduler.averaged(took)
            for member in group.members:
                self.timeline.after(took, self._rows[member][group.stage].begin)
        due, tick_s = self._scheduler.due_at, self.setting.tick_s
        if tick_s and due < math.inf:
            due = math.ceil(due / tick_s) * tick_s
        wait = due - self.timeline.now
        if 0 < wait < math.inf:
            self.timeline.after(wait, self._tick)

    def _tick(self) -> None:
        self._tell(self._scheduler.tick(self.timeline.now))


class _Stage:
    """One stage of the pipeline `row`: ops of the iteration that are left, in order, and inputs that have
    come.
    """

    def __init__(self, swarm: SimPipelines, pipeline: str, row: list[_Stage], seed: int) -> None:
        self.ops: deque[tuple[str, int]] = deque()
        self.pipeline, self.number = pipeline, len(row)
        self._swarm, self._row = swarm, row
        self._random = random.Random(f"{seed} {pipeline} {self.number}")
        self._arrived: set[tuple[str, int]] = set()
        self._busy = False

    def begin(self) -> None:
        """Begin the next iteration, with a nap if it is drawn.

        Raises RuntimeError if the last one is not finished.
        """
        if self._busy or self.ops:
            raise RuntimeError(f"{self.pipeline} has averaged stage {self.number} while it computes")
        setting = self._swarm.setting
        self.ops.extend(_one_forward_one_backward(setting, self.number))
        sleeps = self._random.random() < setting.chance
        self._work_for(setting.sleep_s if sleeps else 0.0, self._next)

    def arrive(self, kind: str, microbatch: int) -> None:
        """Take the input of an op; it may be early, of the next iteration."""
        self._arrived.add((kind, microbatch))
        self._next()

    def _next(self) -> None:
        if self._busy or not self.ops:
            return
        kind, microbatch = op = self.ops[0]
        begins = 0 if kind == "forward" else len(self._row) - 1
        if self.number != begins and op not in self._arrived:
            return
        self.ops.popleft()
        self._arrived.discard(op)
        setting, share = self._swarm.setting, (1 if kind == "forward" else 2) / 3
        seconds = share * setting.stage_s / setting.microbatches
        self._work_for(seconds, lambda: self._done(kind, microbatch))

    def _work_for(self, seconds: float, then: Callable[[], None]) -> None:
        self._busy = True

        def done() -> None:
            self._busy = False
            then()

        self._swarm.timeline.after(seconds, done)

    def _done(self, kind: str, microbatch: int) -> None:
        to = self.number + (1 if kind == "forward" else -1)
        if 0 <= to < len(self._row):
            other = self._row[to]
            self._swarm.timeline.after(self._swarm.setting.hop_s, lambda: other.arrive(kind, microbatch))
        if self.ops:
            self._next()
        else:
            self._swarm.computed(self)


def _one_forward_one_backward(setting: PipelineSetting, number: int) -> Iterator[tuple[str, int]]:
    ahead = min(setting.microbatches, setting.stages - number)
    for microbatch in range(ahead):
        yield "forward", microbatch
    for microbatch in range(setting.microbatches):
        yield "backward", microbatch
        if microbatch + ahead < setting.microbatches:
            yield "forward", microbatch + ahead


def names(count: int) -> list[str]:
    """Pipelines' names, in order."""
    return [f"p{number:04}" for number in range(count)]
