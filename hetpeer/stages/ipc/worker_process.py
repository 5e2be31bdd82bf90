"""One compute worker process: started, asked, stopped for a while, and its death noticed at once.

`Compute` (compute.py) has one for each device. All of it runs on the loop's thread, without background tasks:
the socket and the process's pidfd call back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

from hetpeer.dht.base.errors import ExitCode, LocalError, ProtocolError
from hetpeer.stages.ipc.block_commands import Info, Shutdown
from hetpeer.stages.ipc.worker_messages import (
    Command,
    CommandFailed,
    CommandFailedError,
    FrameReader,
    Result,
    WorkerInfo,
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
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Makes torch ask the kernel for huge pages for tensors of 2 MiB and more (madvise(2), MADV_HUGEPAGE).

A new tensor then costs a page fault for each 2 MiB and not for each 4 KiB: a forward and backward of GPT-2's
head, which makes 300 MB of tensors, takes a sixth less time. Numbers do not change.
"""

STDERR = 2

R = TypeVar("R")


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


class WorkerProcess:
    """One worker process, from `run` to `close`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        loop = asyncio.get_running_loop()
        self._process = process
        self._suspended = False
        self._wire = _Wire(self._wire_lost)
        self.exited: asyncio.Future[None] = loop.create_future()
        """Done once the process has ended."""
        self.device = ""
        """Device that it computes on, once it has answered: `cpu`, `cuda:1`."""
        self._pidfd = os.pidfd_open(process.pid)
        loop.add_reader(self._pidfd, self._process_ended)

    @classmethod
    def run(cls, options: WorkerOptions, worker: str, ours: socket.socket) -> WorkerProcess:
        """Run `python -m worker`, which inherits the descriptors of `options`; `begin` has to follow.

        `ours`, the other end of its socket, is closed if that fails. Raises `LocalError` HP-GPU-003.
        """
        try:
            return cls(spawn(options, worker))
        except OSError as error:
            ours.close()
            raise cannot_start(str(error)) from error

    async def begin(self, ours: socket.socket) -> None:
        """Wait for its first answer. Raises `WorkerDiedError`, `LocalError` HP-GPU-003 after `START_S`.

        The process has ended then, and after cancellation.
        """
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self._wire, sock=ours)
            async with asyncio.timeout(START_S):
                self.device = (await self.info()).device
        except TimeoutError as error:
            await self.kill()
            raise cannot_start(f"it has not answered within {START_S:.0f} s") from error
        except BaseException:
            await self.kill()
            raise

    def __repr__(self) -> str:
        state = "ended" if self.exited.done() else f"pid {self.pid}"
        return f"<WorkerProcess {state}, {self.pending} pending>"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def pending(self) -> int:
        """Commands sent and not answered yet."""
        return len(self._wire.pending)

    def ask(self, command: Command[Any]) -> asyncio.Future[Result]:
        """Send a command now. The future has its answer, or a `WorkerDiedError`; it may be dropped."""
        answer = self._wire.ask(command)
        self._fail_pending()
        return answer

    async def info(self) -> WorkerInfo:
        """The worker's words on itself. Raises as `answered`."""
        command = Info()
        return answered(command, await self.ask(command))

    async def died(self) -> WorkerDiedError:
        """The error with the exit status, once the process has ended."""
        await asyncio.shield(self.exited)
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
        if not self.exited.done():
            os.killpg(self._process.pid, number)

    async def close(self) -> None:
        """Ask the worker to end, and kill it after `CLOSE_S` (at once if suspended), alive or not."""
        try:
            if not self._suspended:
                async with asyncio.timeout(CLOSE_S):
                    await self.ask(Shutdown())
                    await self.died()
        except (TimeoutError, WorkerDiedError):
            pass  # killed next, or dead already
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        await self.died()

    def _process_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self.exited.set_result(None)
        self._fail_pending()

    def _wire_lost(self) -> None:
        # Nothing can be answered any more. The process gets time to end by itself, so that its exit status is
        # known.
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._process.kill)
        self._fail_pending()

    def _fail_pending(self) -> None:
        """Fail open commands once the process has ended *and* its answers are read, in either order."""
        if self.exited.done() and not self._wire.open:
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
        if self.open:  # else it fails with the process's end
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


def answered(command: Command[R], result: Result) -> R:
    """The answer to `command`. Raises `CommandFailedError` (the worker lives on), or `ProtocolError`."""
    if isinstance(result, CommandFailed):
        raise CommandFailedError(result)
    if not isinstance(result, command.answer):
        raise ProtocolError(f"the worker answered {type(command).__name__} with {type(result).__name__}")
    return cast("R", result)


def cannot_start(why: str) -> LocalError:
    """HP-GPU-003."""
    return LocalError(
        "HP-GPU-003",
        "the compute worker cannot be started",
        why=why,
        fix="free some memory and try again",
        exit_code=ExitCode.TRY_LATER,
    )


def spawn(options: WorkerOptions, worker: str) -> subprocess.Popen[bytes]:
    """Start the worker process; it inherits the socket, the arena and both files."""
    environment = os.environ | {
        # The worker imports what we import, installed or not; -P keeps the user's current folder out of it.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": str(options.threads),
        # By default threads that wait for one another spin. Where the owner's programs have the processor,
        # they spin for whole time slices: an update by two threads took fifteen times as long.
        "OMP_WAIT_POLICY": "PASSIVE",
        **MALLOC,
        **HUGE_PAGES,
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", worker, *options.arguments()],
        env=environment,
        pass_fds=(options.socket, options.arena, options.exchange, options.scratch),
        stdin=subprocess.DEVNULL,
        stdout=STDERR,  # the daemon's own standard output is data
        process_group=0,  # processes that it starts are suspended with it
    )
