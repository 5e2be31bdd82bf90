"""The compute worker's process: read a command, have its lane carry it out, answer.

It is a process of its own, so that a CUDA crash, an out-of-memory kill or a pause never stops the daemon's
heartbeat, and so that limits on niceness, cores and GPU memory act on it alone. It may die at any moment
(`kill -9` is always safe), and it never outlives its daemon. Its entry point is averaging/worker_main.py,
which adds the update rule.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from hetpeer.dht.base import failpoints
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.ipc.block_commands import Shutdown
from hetpeer.stages.ipc.worker_messages import (
    Command,
    Done,
    FrameReader,
    Result,
    WorkerLane,
    WorkerOptions,
    decode_command,
    encode_message,
    failed,
)

PR_SET_PDEATHSIG = 1
RECEIVE_BYTES = 1 << 20
KILLED_FIRST = 500
"""Added to the kernel's badness of 0 to 1000, the share of memory that a process takes (proc(5))."""

Execute = Callable[[Command[Any]], Result]
Begin = Callable[[WorkerLane], None]


def settle_in(options: WorkerOptions) -> None:
    """Tie this process to its daemon's life. Call it before torch is imported, which takes seconds."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != options.parent:  # the daemon died before prctl took effect
        sys.exit(1)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole terminal; the daemon decides what it means
    signal.signal(
        signal.SIGTTOU, signal.SIG_IGN
    )  # of a group in the background: its words are not to stop it
    os.nice(options.nice)
    with contextlib.suppress(OSError):  # if memory runs out, nobody else's program dies, nor the daemon
        Path("/proc/self/oom_score_adj").write_text(str(KILLED_FIRST))


def _as_it_is(_lane: WorkerLane) -> None:
    """Leave the lane's thread as it is."""


def serve(connection: socket.socket, lanes: Mapping[WorkerLane, Execute], begin: Begin = _as_it_is) -> None:
    """Answer commands until `Shutdown`, or until the daemon closes the socket.

    Each lane has its own thread, in which `begin` is called first: lane after lane, in the order of `lanes`.
    Raises an error that a lane could not answer: nothing can be computed any more.
    """
    gone = contextlib.suppress(
        BrokenPipeError, ConnectionResetError
    )  # the daemon, while something was under way
    with gone, _Lanes(connection, lanes, begin) as running:
        reader = FrameReader()
        while data := connection.recv(RECEIVE_BYTES):
            for number, body in reader.feed(data):
                try:
                    command = decode_command(body)
                except ProtocolError as error:
                    running.answer(number, failed(error))
                    continue
                if isinstance(command, Shutdown):
                    running.finish()
                    running.answer(number, Done())
                    return
                running.post(number, command)


class _Lanes:
    """One thread for each lane, which carries out its commands in order and answers them."""

    def __init__(self, connection: socket.socket, lanes: Mapping[WorkerLane, Execute], begin: Begin) -> None:
        self._connection = connection
        self._lanes = lanes
        self._begin = begin
        self._threads = {lane: ThreadPoolExecutor(1, thread_name_prefix=lane.value) for lane in lanes}
        self._answering = threading.Lock()
        self._broken: BaseException | None = None

    def __enter__(self) -> Self:
        for lane, thread in self._threads.items():
            thread.submit(self._begin, lane).result()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)
        if self._broken is not None:
            raise self._broken

    def post(self, number: int, command: Command[Any]) -> None:
        """Queue the command in its lane."""
        self._threads[command.lane].submit(self._run, number, command)

    def answer(self, number: int, result: Result) -> None:
        """Send an answer. May be called by any thread."""
        with self._answering:
            self._connection.sendall(encode_message(number, result))

    def finish(self) -> None:
        """Return when everything posted is done."""
        for thread in self._threads.values():
            thread.shutdown()

    def _run(self, number: int, command: Command[Any]) -> None:
        try:
            failpoints.reached(f"worker_{command.kind}")
            self.answer(number, self._lanes[command.lane](command))
        except BaseException as error:  # noqa: BLE001 - raised again by the reading thread, which this wakes
            self._broken = self._broken or error
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
