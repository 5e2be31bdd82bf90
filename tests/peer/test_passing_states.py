"""A state on its way: fetched, loaded, copied and given to others by a real worker and real nodes, in pieces.

What it takes of memory is measured; disks that are full and files that are cut short lose a transfer, and
nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import filecmp
import gc
import os
import resource
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hetpeer.averaging.effects import FetchState, SaveState
from hetpeer.averaging.member.member_life import Phase
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.storage.checkpoints import CheckpointStore, record_of
from hetpeer.bootstrap.storage.file_service import (
    PROTOCOL,
    FileService,
    Served,
    fetch_patiently,
    state_name,
)
from hetpeer.dht.base.errors import LocalError, RemoteError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.peer.limits.settings import WORKER
from hetpeer.peer.preparation import state_fetcher
from hetpeer.peer.preparation.state_fetcher import StateFetcher
from hetpeer.peer.process.span_trace import Trace
from hetpeer.peer.training.held_states import HeldStates
from hetpeer.peer.transport.exchange import reserve_copies
from hetpeer.peer.transport.spill_file import SpillFile
from hetpeer.peer.transport.tensor_store import TensorStore
from hetpeer.peer.transport.worker_posts import WorkerPosts
from hetpeer.stages.block.block_state import BlockState, layout_of
from hetpeer.stages.block.state_file import file_bytes, write_state
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.ipc.block_commands import PrepareBlock
from hetpeer.stages.ipc.compute import Compute, ComputeConfig
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.averaging.rig import LINE, STEP, member_in
from tests.stages.compute_rig import KEPT, UPDATE

VERSION = STEP.number
MIB = 1 << 20
WIDE, NARROW = 4096, 300
"""Rows and columns of a block's matrix: a state of 192 MiB, and one of 1 MiB."""


class Square(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x @ (2 * self.weight) - y) ** 2).mean()


def block_of(width: int) -> BlockSpec:
    row = torch.zeros(1, width)
    (spec,) = cut_blocks(trace(Square(width), {"x": row, "y": row}), 1)
    return spec


class Disk:
    """Checkpoints of a run with one block on a reliable peer's disk."""

    def __init__(self, folder: Path, spec: BlockSpec) -> None:
        folder.mkdir()
        self.folder = folder
        self.limit = file_bytes(layout_of(spec), 1 + len(KEPT))
        run: Any = SimpleNamespace(checkpoints=folder, manifest=SimpleNamespace(optimizer_state=KEPT))
        self.store = CheckpointStore(run, [layout_of(spec)])
        self.store.begin(VERSION)

    def make(self, spec: BlockSpec) -> Record:
        """Keep a state of random numbers."""
        vectors = np.random.default_rng(0).random((1 + len(KEPT), spec.vector_count), np.float32)
        state = BlockState(
            version=VERSION, parameters=vectors[0], optimizer=dict(zip(KEPT, vectors[1:], strict=True))
        )
        with self.store.incoming() as file:
            write_state(file, state, 0, layout_of(spec))
            self.store.put(VERSION, 0, file, state.digest())
        return record_of(VERSION, [state.digest()])

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir())

    def shelf(self, record: Record, opened: Callable[[], None] = lambda: None) -> Any:
        """Gives the checkpoint to others; `opened` is called before it is sent."""

        @contextlib.asynccontextmanager
        async def find(_name: str) -> AsyncIterator[Served | None]:
            part = await asyncio.to_thread(self.store.open, record, 0)
            opened()
            yield Served(part, {"digest": record["blocks"][0]})

        return SimpleNamespace(find=find)


class Volunteer:
    """A volunteer's worker, which waits for the block's state, and what it gives to others."""

    def __init__(self, node: Node, compute: Compute, spec: BlockSpec, room: int) -> None:
        self.node, self.compute, self.spec, self.room = node, compute, spec, room
        self.states = HeldStates(member_in(Phase.READY), asyncio.Event())
        store = TensorStore(compute.arena, SpillFile(Path(), compute.exchange.share))
        trace = Trace(SystemClock(), None, peer="us", name="")
        self.states.use(WorkerPosts(compute, store, trace), {0: room})

    async def load(self, peer: Node, record: Record) -> dict[int, str]:
        fetcher = StateFetcher(self.node, self.compute, [peer.peer_id], len(KEPT), self.states)
        order = FetchState(LINE, VERSION, {}, {0: record["blocks"][0]})
        return await asyncio.wait_for(fetcher.load(order, [self.spec]), 60.0)

    @contextlib.asynccontextmanager
    async def find(self, name: str) -> AsyncIterator[Served | None]:
        _, cluster, version, block = name.split("/")
        async with self.states.find(int(cluster), int(version), int(block)) as served:
            yield served


@contextlib.asynccontextmanager
async def volunteer(node: Node, width: int, folder: Path) -> AsyncIterator[Volunteer]:
    spec = block_of(width)
    compute = await Compute.start(ComputeConfig(device="cpu", arena_bytes=MIB, folder=folder), WORKER)
    try:
        prepare = PrepareBlock(block=0, graph=pack_block(spec), update=UPDATE, keeps=KEPT)
        room = (await compute.submit(prepare)).dump_bytes
        yield Volunteer(node, compute, spec, room)
    finally:
        await compute.close()


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[tuple[Node, Node]]:
    """A reliable peer's node and a volunteer's."""
    reliable = await Node.start(NodeConfig(), Identity.create(tmp_path / "reliable.key"))
    known = (parse_address(reliable.addresses()[0]),)
    other = await Node.start(NodeConfig(peers=known), Identity.create(tmp_path / "volunteer.key"))
    yield reliable, other
    await other.close()
    await reliable.close()


def status_bytes(pid: int, field: str) -> int:
    """A line of /proc/PID/status: VmRSS is the memory in use, VmHWM its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


class Peak:
    """How much a process' memory grows from now on."""

    def __init__(self, pid: int) -> None:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts again from here
        self._pid, self._before = pid, status_bytes(pid, "VmRSS")

    @property
    def grown(self) -> int:
        return status_bytes(self._pid, "VmHWM") - self._before


async def collected(reliable: Node, disk: Disk, giver: Node) -> str:
    """Fetch the volunteer's state for a checkpoint, as the coordinator does."""
    with disk.store.incoming() as file:
        name = state_name(0, VERSION, 0)
        facts = await fetch_patiently(reliable, giver.peer_id, name, disk.limit, file)
        await asyncio.to_thread(disk.store.put, VERSION, 0, file, facts["digest"])
    return str(facts["digest"])


async def test_a_large_state_comes_and_goes_and_takes_no_memory(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    """192 MiB from a checkpoint to the worker and back: daemon and reliable peer are this process."""
    reliable, other = nodes
    async with volunteer(other, WIDE, tmp_path) as ours:
        disk, copies = Disk(tmp_path / "disk", ours.spec), Disk(tmp_path / "copies", ours.spec)
        record = disk.make(ours.spec)
        await reliable.serve(PROTOCOL, FileService(disk.shelf(record)).handle)
        await other.serve(PROTOCOL, FileService(ours).handle)
        gc.collect()
        here, worker = Peak(os.getpid()), Peak(ours.compute.workers[0].pid)
        assert await ours.load(reliable, record) == {0: record["blocks"][0]}
        order = SaveState(LINE, VERSION, {0: record["blocks"][0]})
        await asyncio.gather(*ours.states.snapshot(order))
        assert await collected(reliable, copies, other) == record["blocks"][0]
        assert here.grown < 48 * MIB
        assert worker.grown < disk.limit + 48 * MIB, "the vectors that it keeps, and pieces"
        assert filecmp.cmp(disk.files[0], copies.files[0], shallow=False)
        ours.states.use(None, {})
        assert ours.compute.exchange.used == 0


async def test_a_checkpoint_that_was_fetched_is_not_fetched_again(
    nodes: tuple[Node, Node], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the copy is damaged, or the checkpoint of that version has other bits by now."""
    reliable, other = nodes
    asked: list[Record] = []
    async with volunteer(other, NARROW, tmp_path) as ours:
        disk = Disk(tmp_path / "disk", ours.spec)
        record = disk.make(ours.spec)
        (digest,) = record["blocks"]
        shelf = disk.shelf(record, lambda: asked.append(record))
        await reliable.serve(PROTOCOL, FileService(shelf).handle)
        for _ in range(3):
            assert await ours.load(reliable, record) == {0: digest}
        assert len(asked) == 1
        assert ours.states.own(VERSION, 0, "another digest") is None
        assert ours.states.own(VERSION + 1, 0, digest) is None
        found = ours.states.own(VERSION, 0, digest)
        assert found is not None
        state, _ = found
        state.write(0, bytes(64))
        state.drop()
        assert await ours.load(reliable, record) == {0: digest}
        assert len(asked) == 2
        assert "our copy of block 0's state is damaged" in caplog.text
        assert await ours.load(reliable, record) == {0: digest}
        assert len(asked) == 2


def limit_files(pid: int, nbytes: int) -> None:
    """A process can make no file longer than that: to it the disk is full."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, hard))


async def test_a_full_disk_delays_a_fetch_and_is_told_once(
    nodes: tuple[Node, Node],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_fetcher, "PREPARE_RETRY_S", 0.01)
    reliable, other = nodes
    tried = asyncio.Event()
    async with volunteer(other, NARROW, tmp_path) as ours:
        disk = Disk(tmp_path / "disk", ours.spec)
        record, asked = disk.make(ours.spec), []

        def opened() -> None:
            asked.append(record)
            if len(asked) == 3:
                tried.set()

        await reliable.serve(PROTOCOL, FileService(disk.shelf(record, opened)).handle)
        limit_files(os.getpid(), disk.limit // 2)
        try:
            loading = asyncio.create_task(ours.load(reliable, record))
            await asyncio.wait_for(tried.wait(), 30.0)
        finally:
            limit_files(os.getpid(), resource.RLIM_INFINITY)
        assert await loading == {0: record["blocks"][0]}
        ours.states.use(None, {})
        assert ours.compute.exchange.used == 0
    assert sum("HP-DISK-010" in line.message for line in caplog.records) == 1


async def test_a_full_disk_loses_a_copy_and_a_reserved_one_is_kept(
    nodes: tuple[Node, Node], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reliable, other = nodes
    async with volunteer(other, NARROW, tmp_path) as ours:
        disk, copies = Disk(tmp_path / "disk", ours.spec), Disk(tmp_path / "copies", ours.spec)
        record = disk.make(ours.spec)
        await reliable.serve(PROTOCOL, FileService(disk.shelf(record)).handle)
        await other.serve(PROTOCOL, FileService(ours).handle)
        await ours.load(reliable, record)
        assert ours.states.give_way()
        limit_files(ours.compute.workers[0].pid, ours.room // 2)
        order = SaveState(LINE, VERSION, {0: record["blocks"][0]})
        await asyncio.gather(*ours.states.snapshot(order))
        assert "HP-DISK-009" in caplog.text
        with pytest.raises(RemoteError) as caught:
            await collected(reliable, copies, other)
        assert (caught.value.code, copies.files) == ("HP-SYNC-002", []), "no half of it is given or kept"
        limit_files(ours.compute.workers[0].pid, resource.RLIM_INFINITY)
        reserve_copies(ours.compute.exchange, [ours.room])
        ours.compute.exchange.share.limit = 0
        await asyncio.gather(*ours.states.snapshot(order))
        assert await collected(reliable, copies, other) == record["blocks"][0]


async def test_a_file_that_is_cut_short_is_given_to_nobody(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """Before it is sent it is found damaged; while it is sent, the other gets no end of it."""
    reliable, other = nodes
    spec = block_of(NARROW)
    disk, copies = Disk(tmp_path / "disk", spec), Disk(tmp_path / "copies", spec)
    record = disk.make(spec)
    (path,) = disk.files

    def cut() -> None:
        os.truncate(path, disk.limit // 2)

    await reliable.serve(PROTOCOL, FileService(disk.shelf(record, cut)).handle)
    with pytest.raises(RemoteError):
        await collected(other, copies, reliable)
    assert copies.files == []
    with pytest.raises(LocalError) as caught:
        disk.store.open(record, 0)
    assert caught.value.code == "HP-CKPT-001"


async def test_a_fetch_that_is_given_up_leaves_nothing_in_the_file(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    reliable, other = nodes
    asked = asyncio.Event()
    async with volunteer(other, NARROW, tmp_path) as ours:
        disk = Disk(tmp_path / "disk", ours.spec)
        record = disk.make(ours.spec)
        await reliable.serve(PROTOCOL, FileService(disk.shelf(record, asked.set)).handle)
        loading = asyncio.create_task(ours.load(reliable, record))
        await asyncio.wait_for(asked.wait(), 30.0)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert await ours.load(reliable, record) == {0: record["blocks"][0]}, "what the worker read is done"
        assert ours.states.give_way()
        assert ours.compute.exchange.used == 0
        assert ours.compute.exchange.file.nbytes == 0
