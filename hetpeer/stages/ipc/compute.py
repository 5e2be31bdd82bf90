"""The daemon's handle on its compute workers: starts one for each device, sends commands, notices deaths.

    compute = await Compute.start(ComputeConfig(device="cpu"), "hetpeer.averaging.worker_main")
    extent = compute.arena.allocate(4096)
    result = await compute.submit(InspectVector(extent=extent, elements=1024, normed=()))
    await compute.close()

The workers share the arena and the exchange file. A command about a block goes to the worker that has the
block by the `division` of the place, one about vectors in the arena to the worker with the least to do. The
death of one worker is the end of all.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hetpeer.dht.base.file_pieces import OpenFile
from hetpeer.stages.ipc.arena import Arena
from hetpeer.stages.ipc.block_commands import ClearStep, DropTask, Info, LimitScratch
from hetpeer.stages.ipc.nameless_file import DiskShare, NamelessFile
from hetpeer.stages.ipc.segmented_work import InSegments, SegmentedWork
from hetpeer.stages.ipc.vector_commands import DropCopies, MarkSlot, SumVectors
from hetpeer.stages.ipc.worker_messages import (
    Command,
    CommandFailed,
    CommandFailedError,
    Result,
    WorkerInfo,
    WorkerLane,
    WorkerOptions,
)
from hetpeer.stages.ipc.worker_process import WorkerDiedError, WorkerProcess, answered, cannot_start
from hetpeer.stages.pipeline.division import Division

R = TypeVar("R")

FOR_ALL = (ClearStep, DropTask, DropCopies, LimitScratch)
"""Commands that concern whatever a worker holds, or may hold: each gets them."""
ALL = "all"
"""Name of all GPUs, or of the processor if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """Limits on the computing of this volunteer."""

    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `auto`; several of them with commas between; or `all`."""
    threads: int = 1
    """Threads of one operator on the CPU, of all workers together; each has one at least."""
    nice: int = 10
    """Added to the daemon's own niceness, 0…19."""
    gpu_memory: float = 1.0
    """Fraction of a GPU's memory that may be used."""
    arena_bytes: int = 1 << 30
    """Bytes of shared memory. It costs RAM only as far as it is filled."""
    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    """Folder on whose disk the exchange file and the scratch files lie."""
    disk_bytes: int = 1 << 40
    """Most bytes of that disk that nameless files may have."""


class Compute:
    """One worker process for each device, with their arena, from `start` to `close`."""

    def __init__(self, arena: Arena, exchange: NamelessFile) -> None:
        self.arena = arena
        self.exchange = exchange
        """The file through which states pass."""
        self._started: dict[int, WorkerProcess] = {}
        self._segmented = SegmentedWork(0, self._ask)
        self.division = Division(0, ())
        """Which worker has which blocks of the place."""

    @classmethod
    async def start(cls, config: ComputeConfig, worker: str) -> Compute:
        """Run `python -m worker` for each device and wait for their first answers.

        Call it from the main thread: the kernel kills a worker when the *thread* that started it ends.
        Raises `WorkerDiedError` if one dies, `LocalError` HP-GPU-003 if one cannot be started or says nothing
        for `START_S`. Nothing is left behind then, nor after cancellation.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the compute worker is started from the main thread")
        arena = Arena(config.arena_bytes)
        compute = cls(arena, NamelessFile(config.folder, DiskShare(config.disk_bytes)))
        try:
            await compute._start_on(devices_named(config.device), config, worker)
            if config.device == ALL and (gpus := (await compute.infos())[0].gpus) > 1:
                await compute._close_workers()  # it had the threads of all
                compute._started.clear()
                await compute._start_on([f"cuda:{number}" for number in range(gpus)], config, worker)
        except BaseException:
            await compute._end()
            raise
        return compute

    async def _start_on(self, devices: Sequence[str], config: ComputeConfig, worker: str) -> None:
        """Start a worker on each of `devices`, all at the same time. Raises as `start`."""
        threads = max(config.threads // len(devices), 1)

        async def start_one(at: int, device: str) -> None:
            self._started[at] = await self._start_one(replace(config, device=device, threads=threads), worker)

        starting = (start_one(at, device) for at, device in enumerate(devices))
        for error in await asyncio.gather(*starting, return_exceptions=True):
            if error is not None:
                raise error
        self._segmented = SegmentedWork(len(devices), self._ask)
        self.division = Division(0, (0,) * len(devices))

    async def _start_one(self, config: ComputeConfig, worker: str) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                scratch = OpenFile.nameless(config.folder)  # the worker's own from now on
            except OSError as error:
                ours.close()
                raise cannot_start(str(error)) from error
            options = WorkerOptions(
                socket=theirs.fileno(),
                arena=self.arena.fd,
                exchange=self.exchange.file.descriptor,
                scratch=scratch.descriptor,
                scratch_bytes=config.disk_bytes,
                parent=os.getpid(),
                device=config.device,
                threads=config.threads,
                nice=config.nice,
                gpu_memory=config.gpu_memory,
            )
            process = WorkerProcess.run(options, worker, ours)
        del scratch
        await process.begin(ours)
        return process

    def __repr__(self) -> str:
        return f"<Compute {self.workers}, {self.arena!r}>"

    @property
    def workers(self) -> list[WorkerProcess]:
        """The processes, in the order of the devices."""
        return [process for _, process in sorted(self._started.items())]

    @property
    def pending(self) -> int:
        """Commands sent and not answered yet."""
        return sum(worker.pending for worker in self.workers)

    async def infos(self) -> list[WorkerInfo]:
        """Each worker's words on itself. Raises as `submit`."""
        return await self.submit_to_each(Info())

    def divide(self, division: Division) -> None:
        """Give blocks that are prepared from now on to the workers by `division`."""
        self.division = division

    def refers(self, block: int) -> bool:
        """Whether the worker that has `block` refers to its inputs in the arena until the backward."""
        return self.workers[self.division.device_of(block)].device == "cpu"

    def post(self, command: Command[R]) -> Coroutine[Any, Any, R]:
        """Send a command now; await the returned coroutine for its answer. Each lane of a worker keeps the
        order of posting.

        Awaiting raises `CommandFailedError` (the worker lives on) or `WorkerDiedError`. If cancelled, the
        command is carried out all the same and its answer dropped: its extents stay in use until a later
        command of its lane is answered.
        """
        self._segmented.heed(command)
        return _answer(command, [self._ask(device, command) for device in self._devices(command)])

    def post_segments(self, work: InSegments[R]) -> Coroutine[Any, Any, R]:
        """Begin work in parts; await the coroutine for the joined answer. As `post`.

        A part that fails ends the work; those before it were carried out.
        """
        parts = ((self.division.device_of(part.block), part.command) for part in work.parts)
        return _joined(work, self._segmented.post(parts))

    async def submit(self, command: Command[R]) -> R:
        """`post` and wait for the answer."""
        return await self.post(command)

    async def submit_to_each(self, command: Command[R]) -> list[R]:
        """The answer of each worker to `command`. Raises as `post`."""
        asked = [worker.ask(command) for worker in self.workers]
        return [answered(command, await one) for one in asked]

    def _ask(self, device: int, command: Command[Any]) -> asyncio.Future[Result]:
        return self._started[device].ask(command)

    def _devices(self, command: Command[Any]) -> Sequence[int]:
        """The workers that get `command`."""
        if len(self._started) == 1 or command.lane is WorkerLane.SEND:
            return (0,)
        if command.lane is WorkerLane.RECEIVE:
            return (len(self._started) - 1,)
        if isinstance(command, FOR_ALL):
            return range(len(self._started))
        if (block := block_of(command)) is not None:
            return (self.division.device_of(block),)
        return (min(self._started, key=lambda device: self._started[device].pending),)

    async def died(self) -> WorkerDiedError:
        """The error with the exit status, once a process has ended."""
        exited = {worker.exited: worker for worker in self.workers}
        ended, _ = await asyncio.wait(exited, return_when=asyncio.FIRST_COMPLETED)
        return await exited[ended.pop()].died()

    def suspend(self) -> None:
        """Stop the processes for good: no processor time, no answers. Only `close` may follow."""
        for worker in self.workers:
            worker.suspend()

    def rest(self) -> None:
        """Stop the processes for a moment; commands wait until `wake`."""
        for worker in self.workers:
            worker.rest()

    def wake(self) -> None:
        """Let the processes go on, unless they are suspended."""
        for worker in self.workers:
            worker.wake()

    async def close(self) -> None:
        """Ask the workers to end, kill them after `CLOSE_S` (at once if suspended), and free what was shared.

        Call it once, whether they are alive or not.
        """
        try:
            await self._close_workers()
        finally:
            await self._end()

    async def _close_workers(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers))

    async def _end(self) -> None:
        for worker in self.workers:
            await worker.kill()
        self.arena.close()
        self.exchange.close()


def devices_named(text: str) -> list[str]:
    """The devices in `text`, with commas between them; `all` begins as `auto`."""
    return ["auto"] if text == ALL else text.split(",")


def block_of(command: Command[Any]) -> int | None:
    """The block that a worker must hold for `command`; None: any worker can carry it out."""
    if isinstance(command, MarkSlot):
        return command.marking.block
    if isinstance(command, SumVectors):
        return None if command.rounding is None else command.rounding.block
    block: int | None = getattr(command, "block", None)
    return block


async def _answer(command: Command[R], asked: Sequence[asyncio.Future[Result]]) -> R:
    """The answer to `command`: the first of those of all workers that were asked."""
    first, *_ = [answered(command, await one) for one in asked]
    return first


async def _joined(work: InSegments[R], asked: asyncio.Future[list[Result]]) -> R:
    results = await asked
    if isinstance(results[-1], CommandFailed):
        raise CommandFailedError(results[-1])
    return work.join(
        [answered(part.command, result) for part, result in zip(work.parts, results, strict=True)]
    )
