"""One block of a served run at a volunteer of its own, fetched as volunteers fetch it and trained for a step.

Graph, constants, shards and the initial state come from the reliable peer over the network protocol. A
compute worker makes forward, backward, fold and update. What enters the block is made up, except for the
run's data.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from hetpeer.averaging.effects import FetchState
from hetpeer.averaging.messages.message_fields import TermView
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.node.node import NodeConfig
from hetpeer.peer.arrival.find_run import FoundRun, arrived
from hetpeer.peer.limits.settings import WORKER
from hetpeer.peer.preparation.data_source import DataSource
from hetpeer.peer.preparation.disk_room import Room
from hetpeer.peer.preparation.state_fetcher import RunFiles, StateFetcher, prepare_block
from hetpeer.peer.process.home import Home
from hetpeer.peer.transport.exchange import PassingState
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.graph.block_spec import BlockSpec, TensorSpec
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc.arena import Arena, Extent
from hetpeer.stages.ipc.compute import Compute, ComputeConfig
from hetpeer.stages.operators.random_draws import Draw
from hetpeer.stages.worker.memory_footprint import stage_memory

SPARE = 256 << 20
"""Bytes of the arena beside what enters and leaves the block."""


class PeakMemory:
    """How much the memory of a process grows from now on at most."""

    def __init__(self, pid: int) -> None:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # its peak begins anew
        self._pid, self._before = pid, _status(pid, "VmRSS")

    @property
    def grown(self) -> int:
        """Bytes."""
        return _status(self._pid, "VmHWM") - self._before


def _status(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


@dataclass(frozen=True)
class Volunteer:
    """A volunteer's node in a run, with a home of its own."""

    found: FoundRun
    files: RunFiles
    folder: Path

    @classmethod
    @asynccontextmanager
    async def at(cls, address: str, folder: Path) -> AsyncIterator[Volunteer]:
        """Context with a volunteer that has joined the network of the run at `address`."""
        home = Home(folder)
        config = NodeConfig(host="127.0.0.1", peers=(parse_address(address),))
        home.identity()
        async with arrived(config, home) as found:
            run = home.run(found.signed)
            room = Room(run.path.parent, run.run_id, lambda: 1 << 40)
            reliable = MembershipConfig(found.signed, run.path)
            yield cls(found, RunFiles(found.node, run, reliable, [found.source], room), folder)

    async def train(self, block: int, offload: Offload, *, threads: int, seed: int) -> dict[str, Any]:
        """Fetch `block` and train it for a step; its figures."""
        config = ComputeConfig(
            device="cpu", threads=threads, nice=0, folder=self.folder, arena_bytes=SPARE + (2 << 30)
        )
        compute = await Compute.start(config, WORKER)
        try:
            # The worker's libraries are loaded by then.
            memory, here = PeakMemory(compute.workers[0].pid), PeakMemory(psutil.Process().pid)
            clock = _Clock()
            spec, _ = await prepare_block(compute, self.files, block, offload, spills=True)
            data = await self._data(spec)
            clock.lap("graph_and_data_s")
            digest = await self._state(compute, spec)
            clock.lap("state_s")
            work = _Work(compute, spec, data, seed)
            loss = await work.microbatch()
            clock.lap("microbatch_s")
            after = await work.update()
            clock.lap("update_s")
            plan = stage_memory([spec], 0, self.files.run.manifest.upkeep, 1).demand
            return clock.seconds | {
                "block": block,
                "parameters": spec.parameter_count,
                "loss": loss,
                "begun_as_signed": digest == self.files.run.manifest.blocks[block].state_digest,
                "updated": after != digest,
                "digest": after,
                "planned_bytes": plan.room(offload, apart=False).device,
                "worker_bytes": memory.grown,
                "daemon_bytes": here.grown,
            }
        finally:
            await compute.close()

    async def _data(self, spec: BlockSpec) -> Mapping[str, np.ndarray[Any, Any]]:
        """Arrays of the run's first microbatch, if the block reads any."""
        if not spec.data:
            return {}
        tasks = TaskSet()
        source = DataSource(self.files, [spec], tasks)
        try:
            await source.make_ready(0, 0)
            return source.microbatch(0, 0)
        finally:
            source.close()
            await tasks.close()

    async def _state(self, compute: Compute, spec: BlockSpec) -> str:
        """Load the block's initial state into the worker; its digest there."""
        manifest = self.files.run.manifest
        reliable, kept = self.files.membership_config.peers, len(manifest.optimizer_state)
        fetcher = StateFetcher(self.found.node, compute, reliable, kept, _NoCopies())
        digests = {spec.index: manifest.blocks[spec.index].state_digest}
        loaded = await fetcher.load(FetchState(TermView(term=1, view=0), 0, {}, digests), [spec])
        return loaded[spec.index]


class _NoCopies:
    """A newcomer has no copies of states."""

    def own(self, version: int, block: int, digest: str) -> None:
        """None: it is fetched."""

    def keep(self, line: TermView, version: int, block: int, digest: str, state: PassingState) -> None:
        """Nothing is kept: it is used once."""

    def give_way(self) -> bool:
        """Whether anything was dropped."""
        return False


class _Clock:
    """Seconds of what comes one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._since = round(now - self._since, 3), now


class _Work:
    """A microbatch of a block in its worker, and the update."""

    def __init__(
        self,
        compute: Compute,
        spec: BlockSpec,
        data: Mapping[str, np.ndarray[Any, Any]],
        seed: int,
    ) -> None:
        self._compute, self._spec, self._data = compute, spec.at(spec.batch), data
        self._numbers = np.random.default_rng(seed + spec.index)

    async def microbatch(self) -> float | None:
        """Forward and backward into slot 0; the loss if the block has it."""
        spec, arena = self._spec, self._compute.arena
        entering = {name: self._made_up(one) for name, one in spec.inputs.items()}
        outputs = {name: one for name, one in spec.outputs.items() if name != spec.loss}
        data = {name: _put(arena, self._data[name]) for name in spec.data}
        forward = await self._compute.submit(
            c.Forward(
                step=0,
                versions=(0,),
                task="0",
                begin=spec.index,
                end=spec.index + 1,
                batch=spec.batch,
                draw=Draw(0, 0, 0, 1),
                inputs=entering,
                data=data,
                outputs={name: arena.allocate(one.nbytes) for name, one in outputs.items()},
            )
        )
        await self._compute.submit(
            c.Backward(
                step=0,
                task="0",
                output_gradients={name: self._made_up(one) for name, one in outputs.items() if one.grad},
                input_gradients={
                    name: arena.allocate(one.nbytes) for name, one in spec.inputs.items() if one.grad
                },
                slot=0,
                fold=(spec.index,),
            )
        )
        return forward.loss

    async def update(self) -> str:
        """Apply the slot, as the only holder of a block does; the digest of the new state."""
        block = self._spec.index
        sound = await self._compute.submit(v.InspectSlot(step=0, block=block, slot=0, normed=()))
        assert sound.finite
        applied = await self._compute.submit(
            v.Apply(block=block, slot=0, coefficient=1.0, plan=1, batch=0, microbatches=1, needed=1, base=0)
        )
        return applied.digest

    def _made_up(self, spec: TensorSpec) -> Extent:
        values = self._numbers.standard_normal(spec.sizes, dtype=np.float32)
        if spec.dtype == "bfloat16":  # the upper half of a float32
            return _put(self._compute.arena, (values.view(np.uint32) >> 16).astype(np.uint16))
        return _put(self._compute.arena, values.astype(spec.dtype))


def _put(arena: Arena, array: np.ndarray[Any, Any]) -> Extent:
    extent = arena.allocate(array.nbytes)
    arena.view(extent)[:] = memoryview(np.ascontiguousarray(array)).cast("B")
    return extent
