"""What a holder does for spot checks: lends what it keeps, answers once more, computes what somebody else has done (docs/trust.md).

Pure bookkeeping. What is computed once more goes into a slot of its check, which no plan names, and nowhere else. A slot that lacks something stays unsaid:
the check comes to nothing.
"""

from __future__ import annotations

from hetpeer.stages.execution.effects import (
    Effect,
    ForgetGraph,
    Handle,
    Release,
    ReportChecked,
    SendActivation,
    SendGradient,
    TaskKey,
)
from hetpeer.stages.execution.onward import Onward
from hetpeer.stages.execution.routes import Route
from hetpeer.stages.execution.slots import CHECKS
from hetpeer.stages.execution.taskbook import Status, Task, TaskBook


class Reruns:
    """Those of one step at one holder, whose tasks are `tasks`."""

    def __init__(self, tasks: TaskBook, onward: Onward) -> None:
        self._tasks = tasks
        self._onward = onward
        self._folded: set[TaskKey] = set()
        self._spoilt: set[int] = set()

    # ── for others who check ─────────────────────────────────────────────────────────────────────────────────────

    def lend(self, microbatch: int, route: Route, check: int) -> list[Effect]:
        """Send what we keep of `microbatch` over the border where `route` begins to `route[0]`, who computes it once more."""
        kept = self._tasks.kept(microbatch, route[0].begin)
        if kept is None or kept.output is None:
            return []
        return [SendActivation(microbatch, route, kept.attempt, kept.output, check=check)]

    def answer(self, microbatch: int, border: int, asker: str, handle: Handle) -> list[Effect]:
        """`asker` has computed what somebody else has sent us, and wants the gradient that we gave."""
        task = self._tasks.get(TaskKey(microbatch, border))
        if task is None or task.input_gradient is None:
            return [Release(handle)]
        return [Release(handle), SendGradient(microbatch, asker, border, task.input_gradient)]

    # ── when we check ────────────────────────────────────────────────────────────────────────────────────────────

    def takes(self, key: TaskKey) -> bool:
        """Whether it is to be done: an id enters a slot once."""
        return key not in self._folded and key.check not in self._spoilt and self._tasks.get(key) is None

    def passes_on(self, task: Task, output: Handle) -> list[Effect]:
        """Its forward is done: who was sent that by another gives us the gradient."""
        if not task.route[1:] or not self._onward.knows(task.route[1]):
            return self.failed(task)
        task.status = Status.SENT
        return [SendActivation(task.key.id, task.route[1:], task.attempt, output, asks=True)]

    @staticmethod
    def slot(key: TaskKey) -> int:
        """Where its gradients go."""
        return CHECKS + key.check

    def done(self, task: Task) -> list[Effect]:
        """The gradients of `task` are in the slot, and nothing of it is needed any more."""
        self._folded.add(task.key)
        freed = self._forget(task)
        return freed if task.key.check in self._spoilt else [*freed, ReportChecked(task.key)]

    def failed(self, task: Task) -> list[Effect]:
        """A task of a check cannot be done."""
        self._spoilt.add(task.key.check)
        return [ForgetGraph(task.key), *self._forget(task)]

    def _forget(self, task: Task) -> list[Effect]:
        self._tasks.remove(task.key)
        kept = [handle for handle in (task.output, task.input_gradient) if handle is not None]
        return [*task.release_source(), *task.release_gradient(), *map(Release, kept)]
