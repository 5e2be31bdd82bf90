"""A part of benchmarks.gpu: a place divided among a GPU and the processor, four microbatches under way.

Losses and states must be those of the same two devices in one process, one command after the other.
"""

from __future__ import annotations

from typing import Any

import torch

from hetpeer.averaging.optim.outer_optimizer import outer_of
from hetpeer.averaging.optim.update_rules import rule_of
from hetpeer.peer.limits.settings import WORKER
from hetpeer.stages.block import device as devices
from hetpeer.stages.block.parameter_groups import MakeRules
from hetpeer.stages.ipc.arena import Arena
from hetpeer.stages.ipc.compute import FOR_ALL, Compute, ComputeConfig, block_of
from hetpeer.stages.ipc.segmented_work import InSegments
from hetpeer.stages.ipc.worker_messages import Command, CommandFailed, CommandFailedError
from hetpeer.stages.pipeline.division import Division
from hetpeer.stages.worker.engine import Engine
from hetpeer.stages.worker.state_files import StateFiles
from hetpeer.stages.worker.tensor_staging import Copier, Staging
from tests.peer.divided_rig import MICROBATCHES, Divided, train
from tests.stages.compute_rig import exchange_of, tiny_blocks, tiny_gpt

ARENA = 32 << 20


class InTurn:
    """The same devices without processes: engines that share an arena, one command at a time."""

    def __init__(self, names: list[str]) -> None:
        self.arena = Arena(ARENA)
        self.exchange = exchange_of(self.arena)
        self.division = Division(0, ())
        files, rules = StateFiles(self.exchange.file), MakeRules(rule_of, outer_of)
        self._engines = []
        for device in map(devices.pick, names):
            copier = Copier.of(device)
            engine = Engine(device, Staging(self.arena.memory, copier), files, rules)
            self._engines.append(copier.lane(engine.execute))

    def divide(self, division: Division) -> None:
        self.division = division

    async def post(self, command: Command[Any]) -> Any:
        if isinstance(command, FOR_ALL):
            first, *_ = [self._run(device, command) for device in range(len(self._engines))]
            return first
        block = block_of(command)
        return self._run(0 if block is None else self.division.device_of(block), command)

    async def post_segments(self, work: InSegments[Any]) -> Any:
        return work.join(
            [self._run(self.division.device_of(part.block), part.command) for part in work.parts]
        )

    def _run(self, device: int, command: Command[Any]) -> Any:
        result = self._engines[device](command)
        if isinstance(result, CommandFailed):
            raise CommandFailedError(result)
        return result


async def measure(device: str) -> dict[str, Any]:
    """Rows of benchmarks.gpu."""
    blocks = tiny_blocks()
    torch.set_num_threads(1)
    names = [device, "cpu"]
    ends = (blocks[len(blocks) // 2].index, blocks[-1].index + 1)
    alone = Divided(InTurn(names), blocks, ends)
    await alone.load(tiny_gpt())
    losses, states = await train(alone, 1)
    workers = await Compute.start(ComputeConfig(device=",".join(names), arena_bytes=ARENA), WORKER)
    try:
        there = Divided(workers, blocks, ends)
        await there.load(tiny_gpt())
        infos = await workers.infos()
        found = await train(there, MICROBATCHES)
    finally:
        await workers.close()
    return {
        "devices": [info.device_name for info in infos],
        "blocks": [len(info.blocks) for info in infos],
        "equal losses": found[0] == losses,
        "equal states": found[1] == states,
        "met": found == (losses, states) and all(info.blocks for info in infos),
    }
