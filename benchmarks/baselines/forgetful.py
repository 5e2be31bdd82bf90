"""hetpeer's cores without what they keep: a microbatch that was lost at one stage passes all of them again.

As in SWARM (arXiv 2301.11913), where a dead peer's accumulated gradient is gone with it and others make up
for it from the data on. Everything else is the same: who detects a death and when, how newcomers come in,
what an update waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from hetpeer.bootstrap.coordinator.step import CoordinatedStep
from hetpeer.bootstrap.state.effects import Effect as Order
from hetpeer.stages.pipeline.effects import Effect, Handle
from hetpeer.stages.pipeline.pipeline import Pipeline
from hetpeer.stages.pipeline.routes import Route
from hetpeer.stages.pipeline.task_table import PipelineTask, TaskStatus

RUNNING = (TaskStatus.FORWARD, TaskStatus.GRADIENT, TaskStatus.BACKWARD)


@contextmanager
def forgetful() -> Iterator[None]:
    """While it lasts, nothing that was kept is used when a peer has gone."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(Pipeline, "gone", _gone))
        stack.enter_context(patch.object(Pipeline, "_repeated", _run_anew(Pipeline._repeated)))
        stack.enter_context(patch.object(CoordinatedStep, "without", _without))
        yield


def _gone(self: Pipeline, peer: str) -> list[Effect]:
    """The coordinator hands out what is lost."""
    self.outputs._roster.pop(peer, None)
    return []


def _run_anew(repeated: Any) -> Any:
    def again(
        self: Pipeline,
        task: PipelineTask,
        route: Route,
        attempt: int,
        upstream: str | None,
        source: Handle | None,
    ) -> list[Effect]:
        nudged = source is None and upstream is not None
        counted = task.loss is not None  # the last stage keeps its word on the loss, which flatters this way
        if attempt <= task.attempt or task.status in RUNNING or nudged or counted:
            effects: list[Effect] = repeated(self, task, route, attempt, upstream, source)
            return effects
        del self._tasks[task.key]
        self.schedule.withdraw(task.key)
        self.schedule.finished(task.key)
        return self._enter(task.key.id, route, attempt, upstream=upstream, source=source)

    return again


def _without(self: CoordinatedStep, peers: Sequence[str], now: float) -> list[Order]:
    """As the original, but that all ids whose way leads over `peers` begin anew."""
    lost = [peer for peer in peers if self.ledger.lose(peer)]
    self._progress.over(now)
    over = {i for i, route in self._ways._routes.items() if any(hop.peer in peers for hop in route)}
    effects: list[Order] = self._hand_out(over & self.ledger.undone())
    self.reduction.left(peers)
    if self.reduction.under_way and not lost and self.ledger.complete():
        return effects + self.reduction.plan(now)
    self.reduction.reduce.void()
    return effects + self.advance(now)
