"""A holder whose blocks are on several devices, driven by commands as tests/stages/compute_rig.py does it."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from hetpeer.peer.training.task_segments import backward_in_segments, forward_in_segments
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.ipc.arena import Arena
from hetpeer.stages.ipc.block_commands import Backward, ClearStep, Forward
from hetpeer.stages.ipc.nameless_file import NamelessFile
from hetpeer.stages.ipc.segmented_work import InSegments
from hetpeer.stages.ipc.worker_messages import Command
from hetpeer.stages.pipeline.division import Division
from tests.stages.compute_rig import Holder

MICROBATCHES, STEPS = 4, 2
Result = tuple[list[float], list[bytes]]
"""Losses, and states."""


class Workers(Protocol):
    """Parts that a divided holder needs of `Compute`."""

    arena: Arena
    exchange: NamelessFile

    def divide(self, division: Division) -> None: ...

    def post(self, command: Command[Any]) -> Coroutine[Any, Any, Any]: ...

    def post_segments(self, work: InSegments[Any]) -> Coroutine[Any, Any, Any]: ...


class Divided(Holder):
    """Forwards and backwards are posted at once, and may be awaited later."""

    def __init__(self, workers: Workers, blocks: list[BlockSpec], ends: Sequence[int]) -> None:
        super().__init__(self.send, workers.arena, blocks, workers.exchange)
        division = Division(blocks[0].index, tuple(ends))
        workers.divide(division)
        self.workers = workers
        self.specs = {spec.index: spec for spec in blocks}
        self.segments = division.segments(self.begin, self.end)
        self.between: dict[str, list[Any]] = {}

    def send(self, command: Any) -> Any:
        """Post it now."""
        if isinstance(command, Forward):
            inside = [self.room(self.specs[end - 1].outputs) for _, end in self.segments[:-1]]
            self.between[command.task] = inside
            work = forward_in_segments(command, self.segments, inside, self.specs)
            return self.workers.post_segments(work)
        if isinstance(command, Backward):
            inside = [
                self.room({name: spec for name, spec in self.specs[end].inputs.items() if spec.grad})
                for _, end in self.segments[:-1]
            ]
            self.between[command.task] += inside
            return self.workers.post_segments(backward_in_segments(command, self.segments, inside))
        return self.workers.post(command)

    def forget(self, task: str) -> None:
        """Free the bundles between its segments."""
        self.release(*self.between.pop(task))


async def train(holder: Holder, at_once: int) -> Result:
    """Losses, and the states after STEPS steps with so many microbatches under way."""
    losses: list[float] = []
    for step in range(STEPS):
        tasks = [f"{step}:{number}" for number in range(MICROBATCHES)]
        for begin in range(0, MICROBATCHES, at_once):
            some = list(enumerate(tasks))[begin : begin + at_once]
            forwards = [holder.forward(task, step * MICROBATCHES + number) for number, task in some]
            done = await asyncio.gather(*forwards)
            losses += [loss for _, loss, _ in done]
            # gathered tasks begin in order, and so do the backwards that they post
            await asyncio.gather(
                *(holder.backward(task, number % 2, weight=1 / MICROBATCHES) for number, task in some)
            )
            for (_, task), (_, _, data) in zip(some, done, strict=True):
                holder.release(data)
                if isinstance(holder, Divided):
                    holder.forget(task)
        await holder.merge(source=1, target=0)
        for spec in holder.blocks:
            total = await holder.export(spec, 0)
            await holder.apply(spec, total, 0.5)
            holder.release(total)
        await holder.submit(ClearStep(step=step))
    return losses, [await holder.state(spec.index) for spec in holder.blocks]
