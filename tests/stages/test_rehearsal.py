"""A block is timed on made-up tensors of its own shapes, whatever its operators, and nothing stays behind."""

import pytest
import torch

from hetpeer.peer.preparation.rehearsed_speed import speed_on
from hetpeer.stages.ipc.worker_messages import CommandFailed, CommandFailedError, Rehearsed
from hetpeer.stages.pipeline.division import Division
from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.worker.rehearsal import RUNS, rehearse
from tests.amounts import mostly_proof
from tests.stages.zoo import HERE, ZOO, zoo

pytestmark = pytest.mark.xdist_group("zoo")

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", mostly_proof(ZOO, HERE))
def test_every_block_of_every_model_is_timed(name):
    _, dag, _ = zoo(name)
    for mode in (ComputeMode(), ComputeMode(autocast=True, recompute=True)):
        for spec in cut_blocks(dag, 3, mode):
            buffers = {key: dag.tensors[key] for key in spec.buffer_specs}
            assert 0 < rehearse(spec, buffers, CPU) < 30 / RUNS


class Worker:
    """Answers `Rehearse` as told: seconds, or None for a failure."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.division = Division(0, (99,))
        self.asked = []

    async def submit(self, command):
        self.asked.append(command.block)
        seconds = self.seconds[command.block]
        if seconds is None:
            raise CommandFailedError(
                CommandFailed(code="HP-MEM-002", what="no memory", why="full", fix="wait")
            )
        return Rehearsed(seconds=seconds)


async def test_speed_on_a_place_is_its_flops_over_its_seconds():
    _, dag, _ = zoo("mlp")
    first, *_, last = blocks = cut_blocks(dag, 3)
    worker = Worker({first.index: 0.5, last.index: 1.5})
    flops = 3 * (first.flops_forward + last.flops_forward)
    assert await speed_on(worker, [first, last], 1e12) == pytest.approx(flops / 2.0)
    assert await speed_on(Worker([None] * len(blocks)), blocks, 1e12) == 1e12


async def test_the_slowest_device_is_the_speed_of_a_divided_place():
    _, dag, _ = zoo("mlp")
    blocks = cut_blocks(dag, 3)
    seconds = [0.5] * len(blocks)
    seconds[-1] = 2.0
    worker = Worker(seconds)
    worker.division = Division(0, (len(blocks) - 1, len(blocks)))
    flops = 3 * sum(spec.flops_forward for spec in blocks)
    assert await speed_on(worker, blocks, 1e12) == pytest.approx(flops / 2.0)
