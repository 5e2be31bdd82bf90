"""The daemon's handle on its compute worker: starts it, sends commands, notices at once when it dies.

    compute = await Compute.start(ComputeConfig(device="cpu"), "hetpeer.averaging.worker_main")
    extent = compute.arena.allocate(4096)
    result = await compute.submit(InspectVector(extent=extent, elements=1024, normed=()))
    await compute.close()

All of it runs on the loop's thread, without background tasks: the socket and the process's pidfd call back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from hetpeer.dht.base.errors import ExitCode, LocalError, ProtocolError
from hetpeer.dht.base.file_pieces import OpenFile
from hetpeer.stages.ipc.arena import Arena
from hetpeer.stages.ipc.block_commands import Info, Shutdown
from hetpeer.stages.ipc.nameless_file import DiskShare, NamelessFile
from hetpeer.stages.ipc.worker_messages import (
    Command,
    CommandFailed,
    CommandFailedError,
    FrameReader,
    Result,
    WorkerOptions,
    decode_result,
    encode_message,
)

START_S = 120.0
"""Seconds until the first answer: importing torch takes 2 s on an idle machine, a minute on a busy laptop."""

CLOSE_S = 3.0
"""Seconds the worker has to finish when asked to end; then it is killed, which is always safe."""

LAST_WORDS_S = 15.0
"""Seconds between the loss of the worker's socket and killing the process.

Leaving torch takes 1 s, and several on a busy machine. Nothing waits for it.
"""

MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
"""Settings of glibc's malloc (mallopt(3)).

By default glibc returns each freed tensor of more than 128 KiB to the system, and every new one costs page
faults again. 32 MiB is the highest threshold it takes; at most 128 MiB stay with the worker. Heaps of other
threads are returned whatever the thresholds, so there is one heap for all.
"""

STDERR = 2

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """Limits on the computing of this volunteer."""

    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`."""
    threads: int = 1
    """Threads of one operator on the CPU."""
    nice: int = 10
    """Added to the daemon's own niceness, 0…19."""
    gpu_memory: float = 1.0
    """Fraction of a GPU's memory that may be used."""
    arena_bytes: int = 1 << 30
    """Bytes of shared memory. It costs RAM only as far as it is filled."""
    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    """Folder on whose disk the exchange file and the scratch file lie."""
    disk_bytes: int = 1 << 40
    """Most bytes of that disk that nameless files may have."""


class WorkerDiedError(LocalError):
    """The worker's process has ended; `status` is its exit status, or minus the signal that killed it."""

    def __init__(self, status: int) -> None:
        by = f"signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"exit status {status}"
        memory = status == -signal.SIGKILL
        super().__init__(
            "HP-GPU-001",
            f"the compute worker ended with {by}",
            why="most likely the system ran out of memory" if memory else "its own last lines say more",
            fix="allow hetpeer less work at a time, or another device",
            exit_code=ExitCode.TRY_LATER if status < 0 else ExitCode.NO_DEVICE,
        )
        self.status = status


class Compute:
    """One worker process with its arena, from `start` to `close`; the module's text has an example."""

    def __init__(self, process: subprocess.Popen[bytes], arena: Arena, exchange: NamelessFile) -> None:
        loop = asyncio.get_running_loop()
        self.arena = arena
        self.exchange = exchange
        """The file through which states pass."""
        self._process = process
        self._suspended = False
        self._wire = _Wire(self._wire_lost)
        self._exited: asyncio.Future[None] = loop.create_future()
        self._pidfd = os.pidfd_open(process.pid)
        loop.add_reader(self._pidfd, self._process_ended)

    @classmethod
    async def start(cls, config: ComputeConfig, worker: str) -> Compute:
        """Run `python -m worker` and wait for its first answer.

        Call it from the main thread: the kernel kills the worker when the *thread* that started it ends.
        Raises `WorkerDiedError` if it dies, `LocalError` HP-GPU-003 if it cannot be started or says nothing
        for `START_S`. Nothing is left behind then, nor after cancellation.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the compute worker is started from the main thread")
        arena = Arena(config.arena_bytes)
        exchange = NamelessFile(config.folder, DiskShare(config.disk_bytes))
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                scratch = OpenFile.nameless(config.folder)
                options = WorkerOptions(
                    socket=theirs.fileno(),
                    arena=arena.fd,
                    exchange=exchange.file.descriptor,
                    scratch=scratch.descriptor,
                    scratch_bytes=config.disk_bytes,
                    parent=os.getpid(),
                    device=config.device,
                    threads=config.threads,
                    nice=config.nice,
                    gpu_memory=config.gpu_memory,
                )
                compute = cls(_spawn(options, worker), arena, exchange)
                del scratch  # the worker's own from now on
        except OSError as error:
            ours.close()
            arena.close()
            exchange.close()
            raise _cannot_start(str(error)) from error
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: compute._wire, sock=ours)
            async with asyncio.timeout(START_S):
                await compute.submit(Info())
        except TimeoutError as error:
            await compute._end()
            raise _cannot_start(f"it has not answered within {START_S:.0f} s") from error
        except BaseException:
            await compute._end()
            raise
        return compute

    def __repr__(self) -> str:
        state = "ended" if self._exited.done() else f"pid {self.pid}"
        return f"<Compute {state}, {self.pending} pending, {self.arena!r}>"

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    @property
    def pending(self) -> int:
        """Commands sent and not answered yet."""
        return len(self._wire.pending)

    def post(self, command: Command[R]) -> Coroutine[Any, Any, R]:
        """Send a command now; await the returned coroutine for its answer. Each lane keeps the order of
        posting.

        Awaiting raises `CommandFailedError` (the worker lives on) or `WorkerDiedError`. If cancelled, the
        command is carried out all the same and its answer dropped: its extents stay in use until a later
        command of its lane is answered.
        """
        return self._answer(command, self._wire.ask(command) if self._wire.open else None)

    async def submit(self, command: Command[R]) -> R:
        """`post` and wait for the answer."""
        return await self.post(command)

    async def _answer(self, command: Command[R], asked: asyncio.Future[Result] | None) -> R:
        if asked is None:
            raise await self.died()
        result = await asked
        if isinstance(result, CommandFailed):
            raise CommandFailedError(result)
        if not isinstance(result, command.answer):
            raise ProtocolError(f"the worker answered {type(command).__name__} with {type(result).__name__}")
        return cast("R", result)

    async def died(self) -> WorkerDiedError:
        """The error with the exit status, once the process has ended."""
        await asyncio.shield(self._exited)
        return WorkerDiedError(self._process.returncode)

    def suspend(self) -> None:
        """Stop the process for good: no processor time, no answers. Only `close` may follow."""
        self._suspended = True
        self._signal(signal.SIGSTOP)

    def rest(self) -> None:
        """Stop the process for a moment; commands wait until `wake`."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let the process go on, unless it is suspended."""
        if not self._suspended:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        """Signal the worker's process group."""
        if not self._exited.done():
            os.killpg(self._process.pid, number)

    async def close(self) -> None:
        """Ask the worker to end, kill it after `CLOSE_S` (at once if suspended), and free what was shared.

        Call it once, whether the worker is alive or not.
        """
        try:
            if not self._suspended:
                async with asyncio.timeout(CLOSE_S):
                    await self.submit(Shutdown())
                    await self.died()
        except (TimeoutError, WorkerDiedError):
            pass  # killed next, or dead already
        finally:
            await self._end()

    async def _end(self) -> None:
        self._process.kill()
        await self.died()
        self.arena.close()
        self.exchange.close()

    def _process_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._exited.set_result(None)
        self._fail_pending()

    def _wire_lost(self) -> None:
        # Nothing can be answered any more. The process gets time to end by itself, so that its exit status is
        # known.
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._process.kill)
        self._fail_pending()

    def _fail_pending(self) -> None:
        """Fail open commands once the process has ended *and* its answers are read, in either order."""
        if self._exited.done() and not self._wire.open:
            self._wire.fail(self._process.returncode)


class _Wire(asyncio.Protocol):
    """Commands out and answers in, matched by number."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self.pending: dict[int, asyncio.Future[Result]] = {}
        self._number = 0
        self.open = False
        self._on_lost = on_lost
        self._reader = FrameReader()

    def ask(self, command: Command[Any]) -> asyncio.Future[Result]:
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._number += 1
        self.pending[self._number] = answer
        self._transport.write(encode_message(self._number, command))
        return answer

    def fail(self, status: int) -> None:
        while self.pending:
            _, answer = self.pending.popitem()
            if not answer.done():
                answer.set_exception(WorkerDiedError(status))
                answer.exception()  # if its caller was cancelled, nobody retrieves it, and that is no error

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        try:
            for number, body in self._reader.feed(data):
                result = decode_result(body)
                answer = self.pending.pop(number)
                if not answer.done():  # its caller was cancelled
                    answer.set_result(result)
        except (ProtocolError, KeyError):
            self._transport.abort()  # a worker that talks nonsense is ended

    def connection_lost(self, _: Exception | None) -> None:
        self.open = False
        self._on_lost()


def _cannot_start(why: str) -> LocalError:
    return LocalError(
        "HP-GPU-003",
        "the compute worker cannot be started",
        why=why,
        fix="free some memory and try again",
        exit_code=ExitCode.TRY_LATER,
    )


def _spawn(options: WorkerOptions, worker: str) -> subprocess.Popen[bytes]:
    """Start the worker process; it inherits the socket, the arena and both files."""
    environment = os.environ | {
        # The worker imports what we import, installed or not; -P keeps the user's current folder out of it.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": str(options.threads),
        **MALLOC,
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", worker, *options.arguments()],
        env=environment,
        pass_fds=(options.socket, options.arena, options.exchange, options.scratch),
        stdin=subprocess.DEVNULL,
        stdout=STDERR,  # the daemon's own standard output is data
        process_group=0,  # processes that it starts are suspended with it
    )
