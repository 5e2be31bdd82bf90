"""No memory for what a volunteer is to work on: a real worker under a limit of the kernel's, and a limit of
the disk that is too small.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

from hetpeer.averaging.effects import FetchState, StepId
from hetpeer.averaging.member.member_life import Phase
from hetpeer.averaging.messages import TermView
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.runtime import SystemClock, TaskSet
from hetpeer.peer.limits.settings import WORKER
from hetpeer.peer.preparation import state_fetcher
from hetpeer.peer.preparation.state_fetcher import StateFetcher
from hetpeer.peer.process.span_trace import Trace
from hetpeer.peer.training.held_states import HeldStates
from hetpeer.peer.training.task_execution import HeldPlace, TaskExecution
from hetpeer.peer.transport.exchange import PassingState
from hetpeer.peer.transport.spill_file import SpillFile
from hetpeer.peer.transport.tensor_store import TensorStore
from hetpeer.peer.transport.worker_posts import WorkerPosts
from hetpeer.stages.block.block_state import BlockState, layout_of
from hetpeer.stages.block.state_file import dump
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.ipc.block_commands import Info, PrepareBlock
from hetpeer.stages.ipc.compute import Compute, ComputeConfig
from hetpeer.stages.ipc.nameless_file import DiskShare
from hetpeer.stages.pipeline.effects import RunForward, TaskKey
from hetpeer.stages.pipeline.schedule_1f1b import InFlightWindow
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.averaging.rig import member_in
from tests.stages.compute_rig import KEPT, UPDATE

WIDE = 4096
"""Rows and columns: 64 MiB of parameters, which a heap asks the system for."""
STATE_BYTES = 4 * WIDE * WIDE
ORDER = FetchState(TermView(term=1, view=0), 0, {0: ("holder",)}, {})


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDE, WIDE))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x @ (2 * self.weight) - y) ** 2).mean()


@pytest.fixture(scope="module")
def spec() -> BlockSpec:
    (block,) = cut_blocks(trace(Wide(), {"x": torch.zeros(1, WIDE), "y": torch.zeros(1, WIDE)}), 1)
    return block


@pytest.fixture(scope="module")
def state(spec: BlockSpec) -> bytes:
    return dump(BlockState(version=0, parameters=np.zeros(WIDE * WIDE, np.float32)), 0, layout_of(spec))


class Held:
    """A peer that has the state, and how often it was asked for it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.asked = 0

    async def fetch(
        self, node: object, peer: str, name: str, limit: int, into: PassingState
    ) -> dict[str, str]:
        self.asked += 1
        into.begin(len(self._data))
        into.write(0, self._data)
        return {}


@pytest.fixture
def held(state: bytes, monkeypatch: pytest.MonkeyPatch) -> Held:
    peer = Held(state)
    monkeypatch.setattr(state_fetcher, "fetch_into", peer.fetch)
    return peer


async def prepared(spec: BlockSpec, disk_bytes: int) -> Compute:
    """A worker that waits for the block's state."""
    config = ComputeConfig(device="cpu", arena_bytes=2 * STATE_BYTES, disk_bytes=disk_bytes)
    compute = await Compute.start(config, WORKER)
    await compute.submit(PrepareBlock(block=0, graph=pack_block(spec), update=UPDATE, keeps=KEPT))
    return compute


@pytest.fixture
async def compute(spec: BlockSpec) -> AsyncIterator[Compute]:
    made = await prepared(spec, 2 * STATE_BYTES)
    yield made
    await made.close()


def limit(compute: Compute) -> None:
    """From now on the worker gets no more memory than for half a state."""
    taken = psutil.Process(compute.workers[0].pid).memory_info().vms
    resource.prlimit(
        compute.workers[0].pid, resource.RLIMIT_AS, (taken + STATE_BYTES // 2, resource.RLIM_INFINITY)
    )


def fetcher(compute: Compute) -> StateFetcher:
    copies = HeldStates(member_in(Phase.READY), asyncio.Event())  # none, as it serves no worker
    return StateFetcher(SimpleNamespace(peer_id="us"), compute, (), len(KEPT), copies)  # type: ignore[arg-type]


async def test_a_state_for_which_there_is_no_memory_ends_it_and_is_not_fetched_again(
    compute: Compute, spec: BlockSpec, held: Held
) -> None:
    limit(compute)
    with pytest.raises(LocalError) as caught:
        await asyncio.wait_for(fetcher(compute).load(ORDER, [spec]), 60.0)
    assert (caught.value.code, caught.value.exit_code, held.asked) == ("HP-MEM-002", ExitCode.TOO_SMALL, 1)
    assert compute.exchange.used == 0
    assert (await compute.submit(Info())).blocks == (), "the worker lives on"
    resource.prlimit(
        compute.workers[0].pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert (await fetcher(compute).load(ORDER, [spec])).keys() == {0}


@pytest.mark.proof
async def test_a_state_that_is_larger_than_the_disks_limit_ends_it_too(spec: BlockSpec, held: Held) -> None:
    compute = await prepared(spec, STATE_BYTES // 2)
    try:
        with pytest.raises(LocalError) as caught:
            await asyncio.wait_for(fetcher(compute).load(ORDER, [spec]), 60.0)
    finally:
        await compute.close()
    assert (caught.value.code, caught.value.exit_code, held.asked) == ("HP-DISK-010", ExitCode.TOO_SMALL, 1)


@pytest.mark.proof
async def test_a_state_waits_for_what_is_in_its_way(
    compute: Compute, spec: BlockSpec, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy for somebody else is in the exchange file, and goes."""
    room = fetcher(compute)
    other = compute.exchange.take(compute.exchange.share.limit - STATE_BYTES // 2)
    waits = asyncio.Event()
    sleep = asyncio.sleep

    async def noticed(seconds: float) -> None:
        waits.set()
        await sleep(seconds)

    monkeypatch.setattr(state_fetcher.asyncio, "sleep", noticed)
    loading = asyncio.ensure_future(room.load(ORDER, [spec]))
    await asyncio.wait_for(waits.wait(), 60.0)
    compute.exchange.give(other)
    assert (await asyncio.wait_for(loading, 60.0)).keys() == {0}
    assert held.asked == 2


async def test_a_microbatch_for_which_there_is_no_memory_is_left_to_others_and_said_once(
    compute: Compute, spec: BlockSpec, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    await fetcher(compute).load(ORDER, [spec])
    limit(compute)
    row = np.zeros((1, WIDE), np.float32)
    failed: list[tuple[object, ...]] = []
    schema = SimpleNamespace(
        specs={0: spec},
        output_layout=lambda *_: None,
        batch=lambda _: 1,
        seed=0,
        microbatches=2,
    )
    place = HeldPlace(
        "us",
        SimpleNamespace(work=SimpleNamespace(work_failed=lambda *args: failed.append(args))),  # type: ignore[arg-type]
        WorkerPosts(
            compute,
            TensorStore(compute.arena, SpillFile(Path(), DiskShare(0))),
            Trace(SystemClock(), None, peer="us", name=""),
        ),
        schema,  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        InFlightWindow(),
        SimpleNamespace(microbatch=lambda *_: {"x": row, "y": row}),  # type: ignore[arg-type]
        TaskSet(),
        lambda _: None,
        lambda *_: None,
    )
    execution = TaskExecution(place)
    for number in (0, 1):
        work = RunForward(TaskKey(number, 0), 1, None, train=True, hops_after=0)
        await execution.forward(StepId(ORDER.line, 0), work)  # type: ignore[arg-type]
    assert [why for _, _, why, _ in failed] == ["the compute worker is out of memory"] * 2
    (said,) = [record.message for record in caplog.records if "HP-MEM-002" in record.message]
    assert f"you tried to allocate {STATE_BYTES} bytes" in said
    assert "allow less with --ram-limit" in said
