"""A gate between the network and the member core: holds back tasks until their microbatch's data is here.

To the core a task whose data is still on its way is like any late message. So nothing in the core knows of
data, and every command that it asks for can be posted at once and in order. Other tasks go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import StepId
from hetpeer.averaging.member.tensor_heads import ActivationHead
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.peer.preparation.data_source import DataSource
from hetpeer.stages.pipeline.routes import Hop


class DataGate:
    """The gate of one place, before the blocks that `source` serves; without one everything passes."""

    def __init__(self, source: DataSource | None, tasks: TaskSet) -> None:
        self._source = source
        self._tasks = tasks
        self._held: dict[asyncio.Task[None], StepId] = {}
        self._begun: dict[StepId, int] = {}
        """The last steps that began here, beside one another → the batch that each trains."""

    def message(self, message: m.Begin | m.Reroute, receive: Callable[[m.Message], None]) -> None:
        """Tasks that start here. Those that must wait for their data go to `receive` later, as a
        `Reroute`.
        """
        step = StepId(message.line, message.step)
        if isinstance(message, m.Begin):
            self._begun = {**(self._begun if message.behind else {}), step: message.batch}
            if self._source is not None and not message.group:
                self._source.begun(message.batch)
        if step not in self._begun:
            receive(message)  # of a step that is past, or has not begun: the core knows what to do
            return
        batch = self._begun[step]
        ready: list[m.Task] = []
        late: list[m.Task] = []
        for task in message.tasks:
            (ready if self._may_pass(batch, task.id, task.route[0]) else late).append(task)
        receive(message.model_copy(update={"tasks": tuple(ready)}))
        for task in late:
            again = m.Reroute(line=message.line, step=message.step, tasks=(task,))
            self._hold(step, batch, task.id, partial(receive, again))

    def activation(self, head: ActivationHead, receive: Callable[[], None]) -> None:
        """A task that goes on here."""
        if self._may_pass(head.batch, head.id, head.route[0]):
            receive()
        else:
            self._hold(head.step_id, head.batch, head.id, receive)

    def end_step(self, step: StepId) -> None:
        """`step` is over and its tensors are freed: let nothing of it through any more."""
        for task in [task for task, held in self._held.items() if held == step]:
            task.cancel()

    def close(self) -> None:
        """Let nothing through any more, and fetch nothing."""
        if self._source is not None:
            self._source.close()
        for task in list(self._held):
            task.cancel()

    def _may_pass(self, batch: int, number: int, hop: Hop) -> bool:
        source = self._source
        if source is None or not source.concerns(batch, number, hop.begin, hop.end):
            return True
        source.named(batch, number)
        return source.is_ready(batch, number)

    def _hold(self, step: StepId, batch: int, number: int, let_go: Callable[[], None]) -> None:
        async def wait() -> None:
            assert self._source is not None
            await self._source.make_ready(batch, number)
            let_go()

        task = self._tasks.spawn(wait(), name=f"data of microbatch {number}")
        self._held[task] = step
        task.add_done_callback(self._held.pop)
