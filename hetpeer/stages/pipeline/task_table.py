"""The tasks of one step at one holder: where each stands, and what is kept of it.

Pure bookkeeping. A task that is forgotten counts as never done here: it is done again when it is asked for.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from hetpeer.stages.pipeline.effects import Handle, Release, TaskKey
from hetpeer.stages.pipeline.routes import Route

OFTEN = 4
"""Attempts after which it is not churn that an id is handed out again."""
OVERTAKEN = 2
"""A task past which so many times as many gradients have come as are waited for will get none."""


class Status(enum.Enum):
    """Where a task stands at this holder."""

    READY = "ready"
    FORWARD = "forward"
    SENT = "sent"
    GRADIENT = "gradient"
    BACKWARD = "backward"
    DONE = "done"


@dataclass(slots=True)
class PipelineTask:
    """One microbatch over the blocks of `route[0]`."""

    key: TaskKey
    route: Route
    """From this hop on."""
    attempt: int
    upstream: str | None
    train: bool
    status: Status = Status.READY
    source: Handle | None = None
    output: Handle | None = None
    gradient: Handle | None = None
    input_gradient: Handle | None = None
    loss: float | None = None
    returned: int = 0
    """Gradients of others that had come when its output was sent."""
    sent_to: set[str] = field(default_factory=set)
    """Whoever was sent the output: any of them may count it."""

    @property
    def end(self) -> int:
        return self.route[0].end

    def release_source(self) -> list[Release]:
        """What it was computed from is not needed any more."""
        source, self.source = self.source, None
        return [] if source is None else [Release(source)]

    def release_gradient(self) -> list[Release]:
        """The gradient that came back is in a slot, or is of no use."""
        gradient, self.gradient = self.gradient, None
        return [] if gradient is None else [Release(gradient)]


class TaskTable:
    """All of them, in the order in which they came."""

    def __init__(self) -> None:
        self._tasks: dict[TaskKey, PipelineTask] = {}

    def __iter__(self) -> Iterator[PipelineTask]:
        return iter(self._tasks.values())

    def __getitem__(self, key: TaskKey) -> PipelineTask:
        return self._tasks[key]

    def get(self, key: TaskKey) -> PipelineTask | None:
        """The task, if it is known here."""
        return self._tasks.get(key)

    def enter(self, task: PipelineTask) -> None:
        """It is ours to do."""
        self._tasks[task.key] = task

    def remove(self, key: TaskKey) -> None:
        """It is not ours any more, or failed."""
        del self._tasks[key]

    def forget(self, ids: Collection[int], blocks: Collection[int]) -> None:
        """Finished tasks of `ids` whose gradient was dropped at one of `blocks` count as never done."""
        for key, task in list(self._tasks.items()):
            touches = not key.check and any(key.begin <= block < task.end for block in blocks)
            if key.id in ids and touches and task.status is Status.DONE and task.train:
                del self._tasks[key]

    def awaiting(self, microbatch: int, border: int) -> list[PipelineTask]:
        """Those that wait for the gradient of what `microbatch` sent over `border`: several, where it came here at several blocks."""
        return [
            task
            for task in self
            if task.key.id == microbatch and task.end == border and task.status is Status.SENT and task.train
        ]

    def stuck(self, attempt: int, returned: int, aside: Collection[TaskKey] = ()) -> PipelineTask | None:
        """One, not `aside`, that got stuck on its way to the loss and back, when others are handed out for this `attempt` and `returned` gradients have come: it was handed out less often, most
        likely to others since, while no gradient comes at all, or again and again; or many have overtaken it.
        """
        sent = (task for task in self if task.status is Status.SENT and task.key not in aside)
        waiting = [task for task in sent if task.train and not task.key.check]
        stuck = (
            task
            for task in waiting
            if (task.attempt < attempt and (task.returned == returned or attempt >= OFTEN))
            or returned - task.returned > OVERTAKEN * len(waiting)
        )
        return min(stuck, key=lambda task: task.attempt, default=None)

    def kept(self, microbatch: int, border: int) -> PipelineTask | None:
        """A task whose output over `border` is kept, so that it can be lent."""
        return next(
            (
                task
                for task in self
                if task.key.id == microbatch
                and task.end == border
                and task.output is not None
                and task.train
                and not task.key.check
            ),
            None,
        )

    def losses(self, ids: Collection[int]) -> dict[int, float]:
        """Of those of `ids` that were trained and ended here."""
        return {
            task.key.id: task.loss
            for task in self
            if task.train and task.loss is not None and task.key.id in ids and not task.key.check
        }

    @property
    def idle(self) -> bool:
        """Whether none that is trained is in progress, but for spot checks."""
        return all(task.status is Status.DONE for task in self if task.train and not task.key.check)
