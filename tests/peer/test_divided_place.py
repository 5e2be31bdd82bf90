"""A place divided among devices, here workers on the processor: the bits of one device, and what fails."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from types import SimpleNamespace

import psutil
import pytest
import torch

from hetpeer.stages.ipc.arena import Arena
from hetpeer.stages.ipc.block_commands import ClearStep
from hetpeer.stages.ipc.compute import Compute, ComputeConfig
from hetpeer.stages.ipc.worker_messages import CommandFailedError
from hetpeer.stages.ipc.worker_process import WorkerDiedError
from tests.peer.divided_rig import MICROBATCHES, Divided, Result, train
from tests.stages.compute_rig import (
    Holder,
    cpu_engine,
    microbatch,
    refused,
    submitter,
    tiny_blocks,
    tiny_gpt,
)

WORKER = "hetpeer.averaging.worker_main"

_EXPECTED: list[Result] = []


@pytest.fixture
async def expected() -> Result:
    """Results of one device, in this process."""
    if not _EXPECTED:
        torch.set_num_threads(1)
        arena = Arena(32 << 20)
        holder = Holder(submitter(cpu_engine(arena)), arena, tiny_blocks())
        await holder.load(tiny_gpt())
        _EXPECTED.append(await train(holder, 1))
        arena.close()
    return _EXPECTED[0]


async def workers(devices: str) -> Compute:
    return await Compute.start(ComputeConfig(device=devices, nice=0, arena_bytes=32 << 20), WORKER)


@pytest.fixture
async def compute() -> AsyncIterator[Compute]:
    started = await workers("cpu,cpu")
    yield started
    await started.close()


async def holder_on(compute: Compute) -> Divided:
    """The first block on one device, the others on the other."""
    blocks = tiny_blocks()
    holder = Divided(compute, blocks, (blocks[0].index + 1, blocks[-1].index + 1))
    await holder.load(tiny_gpt())
    return holder


async def test_a_divided_place_trains_bit_for_bit_as_one_device(compute: Compute, expected: Result) -> None:
    """Whether microbatches are done one by one or side by side."""
    for at_once in (1, MICROBATCHES):
        holder = await holder_on(compute)
        first, second = await compute.infos()
        assert (len(first.blocks), len(second.blocks)) == (1, len(holder.blocks) - 1)
        assert await train(holder, at_once) == expected
        assert [info.tasks for info in await compute.infos()] == [0, 0]
        assert compute.arena.used == 0


async def test_nothing_is_left_of_what_failed_or_is_over(compute: Compute) -> None:
    holder = await holder_on(compute)
    await holder.forward("a", 0)
    with refused("HP-NUM-001", "task a"):
        await holder.backward("a", 0, weight=float("1e38"))
    forwards = [asyncio.ensure_future(holder.forward(f"{number}", number)) for number in range(8)]
    await asyncio.sleep(0)
    await holder.submit(ClearStep(step=0))
    done = await asyncio.gather(*forwards, return_exceptions=True)
    assert all(isinstance(one, CommandFailedError | tuple) for one in done)
    assert isinstance(done[-1], CommandFailedError), "its second part was called off"
    assert [info.tasks for info in await compute.infos()] == [0, 0]
    _, loss, _ = await holder.forward("b", 1)
    assert loss == pytest.approx(tiny_gpt()(**microbatch(1)).item())
    await holder.backward("b", 0)


async def test_the_death_of_one_worker_is_the_end_of_all() -> None:
    compute = await workers("cpu,cpu")
    holder = await holder_on(compute)
    died = asyncio.ensure_future(compute.died())
    under_way = asyncio.ensure_future(holder.forward("a", 0))
    await asyncio.sleep(0)
    os.kill(compute.workers[1].pid, signal.SIGKILL)
    assert (await died).status == -signal.SIGKILL
    with pytest.raises(WorkerDiedError):
        await under_way
    pids = [worker.pid for worker in compute.workers]
    await compute.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_if_one_worker_does_not_start_none_is_left() -> None:
    before = psutil.Process().children()
    with pytest.raises(WorkerDiedError):
        await workers("cpu,cuda:99")
    assert psutil.Process().children() == before


async def test_all_is_the_processor_where_there_is_no_gpu_and_else_a_worker_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here a worker only claims that there are two: those that are then started do not find them."""
    before = psutil.Process().children()
    alone = await workers("all")
    assert [worker.device for worker in alone.workers] == ["cpu"]
    await alone.close()

    async def two(_: Compute) -> list[SimpleNamespace]:
        return [SimpleNamespace(gpus=2)]

    monkeypatch.setattr(Compute, "infos", two)
    with pytest.raises(WorkerDiedError):
        await workers("all")
    assert psutil.Process().children() == before
