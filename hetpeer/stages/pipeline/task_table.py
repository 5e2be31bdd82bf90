"""The tasks of one step at one holder: their status, and the tensors kept for each.

Pure bookkeeping. A forgotten task counts as never done here: it is done again when asked for.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from hetpeer.stages.pipeline.effects import Handle, Release, TaskKey
from hetpeer.stages.pipeline.routes import Route

OFTEN = 4
"""Attempts from which on a repeated id is no longer explained by churn."""
OVERTAKEN = 2
"""A task is stuck when this many times as many gradients have come since as tasks are waiting."""


class TaskStatus(enum.Enum):
    """Status of a task at this holder."""

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
    """The route from this hop on."""
    attempt: int
    upstream: str | None
    train: bool
    status: TaskStatus = TaskStatus.READY
    source: Handle | None = None
    output: Handle | None = None
    gradient: Handle | None = None
    input_gradient: Handle | None = None
    loss: float | None = None
    returned: int = 0
    """Gradients of other tasks that had come when its output was sent."""
    sent_to: set[str] = field(default_factory=set)
    """All peers that were sent the output: any of them may count it."""

    @property
    def end(self) -> int:
        """The block after its last one."""
        return self.route[0].end

    def release_source(self) -> list[Release]:
        """Release its source, which is no longer needed."""
        source, self.source = self.source, None
        return [] if source is None else [Release(source)]

    def release_gradient(self) -> list[Release]:
        """Release the gradient that came back, which is in a slot or of no use."""
        gradient, self.gradient = self.gradient, None
        return [] if gradient is None else [Release(gradient)]


class TaskTable:
    """All tasks, in the order in which they came."""

    def __init__(self) -> None:
        self._tasks: dict[TaskKey, PipelineTask] = {}

    def __iter__(self) -> Iterator[PipelineTask]:
        return iter(self._tasks.values())

    def __getitem__(self, key: TaskKey) -> PipelineTask:
        return self._tasks[key]

    def get(self, key: TaskKey) -> PipelineTask | None:
        """The task; None if it is unknown here."""
        return self._tasks.get(key)

    def enter(self, task: PipelineTask) -> None:
        """Add a task."""
        self._tasks[task.key] = task

    def remove(self, key: TaskKey) -> None:
        """Remove a task that is not ours any more, or failed."""
        del self._tasks[key]

    def forget(self, ids: Collection[int], blocks: Collection[int]) -> None:
        """Forget finished tasks of `ids` whose gradient was dropped at one of `blocks`."""
        for key, task in list(self._tasks.items()):
            touches = not key.check and any(key.begin <= block < task.end for block in blocks)
            if key.id in ids and touches and task.status is TaskStatus.DONE and task.train:
                del self._tasks[key]

    def awaiting(self, microbatch: int, border: int) -> list[PipelineTask]:
        """Tasks that wait for the gradient of what `microbatch` sent over `border`; several if it came at
        several blocks.
        """
        return [
            task
            for task in self
            if task.key.id == microbatch
            and task.end == border
            and task.status is TaskStatus.SENT
            and task.train
        ]

    def stuck(self, attempt: int, returned: int, aside: Collection[TaskKey] = ()) -> PipelineTask | None:
        """A stuck task, not in `aside`, as others are handed out for `attempt` and `returned` gradients have
        come.

        A task is stuck if it was handed out less often, so most likely to others since, while no gradient
        comes at all or ids are handed out again and again; or if many have overtaken it. None if there is
        none.
        """
        sent = (task for task in self if task.status is TaskStatus.SENT and task.key not in aside)
        waiting = [task for task in sent if task.train and not task.key.check]
        stuck = (
            task
            for task in waiting
            if (task.attempt < attempt and (task.returned == returned or attempt >= OFTEN))
            or returned - task.returned > OVERTAKEN * len(waiting)
        )
        return min(stuck, key=lambda task: task.attempt, default=None)

    def kept(self, microbatch: int, border: int) -> PipelineTask | None:
        """A task whose output over `border` is kept and can be lent; None if there is none."""
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
        """Id → loss of those of `ids` that were trained and ended here."""
        return {
            task.key.id: task.loss
            for task in self
            if task.train and task.loss is not None and task.key.id in ids and not task.key.check
        }

    @property
    def idle(self) -> bool:
        """Whether no training task is in progress, except for spot checks."""
        return all(task.status is TaskStatus.DONE for task in self if task.train and not task.key.check)
