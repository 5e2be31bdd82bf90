"""Recomputation for spot checks: lend kept tensors, answer again, recompute others' work, have it compared.

Pure bookkeeping; docs/trust.md explains the checks. Recomputed gradients go into a slot of their check, which
no reduce plan names. A slot that lacks something is never reported, and the check has no result.
"""

from __future__ import annotations

from hetpeer.stages.block.rounding import Rounding
from hetpeer.stages.pipeline.effects import (
    CompareBundle,
    Effect,
    ForgetGraph,
    Handle,
    Release,
    ReportChecked,
    SendActivation,
    SendGradient,
    TaskKey,
)
from hetpeer.stages.pipeline.gradient_slots import CHECKS
from hetpeer.stages.pipeline.routes import Route
from hetpeer.stages.pipeline.task_table import KeptOutputs, PipelineTask, TaskStatus, TaskTable


class Recomputations:
    """Recomputations of one step at one holder, whose tasks are `tasks`."""

    def __init__(self, tasks: TaskTable, outputs: KeptOutputs) -> None:
        self._tasks = tasks
        self._outputs = outputs
        self._folded: set[TaskKey] = set()
        self._spoilt: set[int] = set()

    # ── for others who check ───────────────────────────────────────────────────────────────────────────────

    def lend(self, microbatch: int, route: Route, check: int) -> list[Effect]:
        """Send our kept bundle of `microbatch` that enters `route[0].begin` to `route[0]` once more."""
        kept = self._tasks.kept(microbatch, route[0].begin)
        if kept is None or kept.output is None:
            return []
        return [SendActivation(microbatch, route, kept.attempt, kept.output, check=check)]

    def answer(self, microbatch: int, border: int, asker: str, handle: Handle, check: int) -> list[Effect]:
        """`asker` has recomputed a bundle that another peer sent us: compare them, send it our gradient."""
        task = self._tasks.get(TaskKey(microbatch, border))
        effects: list[Effect] = [
            CompareBundle(check, microbatch, border, False, asker, handle),
            Release(handle),
        ]
        if task is not None and task.input_gradient is not None:
            effects.append(SendGradient(microbatch, asker, border, task.input_gradient))
        return effects

    @staticmethod
    def returned(microbatch: int, border: int, peer: str, handle: Handle, check: int) -> list[Effect]:
        """`peer` has recomputed a bundle that we lent it: compare its gradient with the one we were sent."""
        return [CompareBundle(check, microbatch, border, True, peer, handle), Release(handle)]

    # ── when we check ──────────────────────────────────────────────────────────────────────────────────────

    def takes(self, key: TaskKey) -> bool:
        """Whether to do `key`: an id enters a slot once."""
        return key not in self._folded and key.check not in self._spoilt and self._tasks.get(key) is None

    def goes(self, task: PipelineTask, route: Route) -> list[Effect]:
        """Take in the route of `task`, now that it is known which peer has its gradient, if that changed."""
        elsewhere = route[1:2] != task.route[1:2]
        task.route = route
        asks = elsewhere and task.status is TaskStatus.SENT and task.output is not None
        return self.passes_on(task, task.output) if asks else []

    def passes_on(self, task: PipelineTask, output: Handle) -> list[Effect]:
        """Ask, after the forward of `task`, the peer that got this bundle from another for the gradient."""
        if not task.route[1:] or not self._outputs.knows(task.route[1]):
            return self.failed(task)
        task.status = TaskStatus.SENT
        return [SendActivation(task.key.id, task.route[1:], task.attempt, output, task.key.check, asks=True)]

    @staticmethod
    def slot(key: TaskKey) -> int:
        """Slot number for the gradients of `key`."""
        return CHECKS + key.check

    def done(self, task: PipelineTask, rounding: Rounding) -> list[Effect]:
        """The gradients of `task` are in the slot: report it; send the gradient to the lender to compare."""
        self._folded.add(task.key)
        if task.key.check in self._spoilt:
            return self._forget(task)
        told: list[Effect] = [ReportChecked(task.key, rounding)]
        if task.upstream is not None and task.input_gradient is not None:
            key, back = task.key, task.input_gradient
            told.append(SendGradient(key.id, task.upstream, key.begin, back, key.check))
            task.input_gradient = None  # kept until it has arrived
        return [*self._forget(task), *told]

    def failed(self, task: PipelineTask) -> list[Effect]:
        """A task of a check cannot be done; the check has no result."""
        self._spoilt.add(task.key.check)
        return [ForgetGraph(task.key), *self._forget(task)]

    def _forget(self, task: PipelineTask) -> list[Effect]:
        del self._tasks[task.key]
        kept = [handle for handle in (task.output, task.input_gradient) if handle is not None]
        return [*task.release_inputs(), *map(Release, kept)]
