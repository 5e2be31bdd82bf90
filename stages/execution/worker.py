"""The compute worker's process: read a command, execute it, answer; nothing else happens here.

A process of its own, so that a CUDA crash, an out-of-memory kill or a pause never stops the daemon's heartbeat, and
so that nice, cores and GPU memory limits act on it alone. It may die at any moment (`kill -9` is always safe), and it
never outlives its daemon. Its entry point is averaging/worker_main.py, where the update rule is put in.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hetpeer.dht.errors import ProtocolError
from hetpeer.stages.execution.commands import Command, Shutdown
from hetpeer.stages.execution.frames import FrameReader, decode_command, encode_result
from hetpeer.stages.execution.results import Result, failed

PR_SET_PDEATHSIG = 1
RECEIVE_BYTES = 1 << 20

Execute = Callable[[Command[Any]], Result]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What the daemon tells the worker on its command line. `socket` and `arena` are inherited descriptors."""

    socket: int
    arena: int
    parent: int
    device: str
    threads: int
    nice: int

    def arguments(self) -> list[str]:
        return [f"--{name}={getattr(self, name)}" for name in self.__slots__]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> WorkerOptions:
        parser = argparse.ArgumentParser(description="hetpeer's compute worker; started by its daemon")
        for name in ("socket", "arena", "parent", "threads", "nice"):
            parser.add_argument(f"--{name}", type=int, required=True)
        parser.add_argument("--device", required=True)
        return cls(**vars(parser.parse_args(arguments)))


def settle_in(options: WorkerOptions) -> None:
    """Tie this process to its daemon's life. Call it first: importing torch takes seconds, and a daemon may die in them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != options.parent:  # it died before prctl took effect
        sys.exit(1)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole terminal; the daemon decides what it means
    os.nice(options.nice)


def serve(connection: socket.socket, execute: Execute) -> None:
    """Answer commands one by one, in order, until `Shutdown` or until the daemon's end of the socket closes."""
    with contextlib.suppress(
        BrokenPipeError, ConnectionResetError
    ):  # the daemon went while something was under way
        reader = FrameReader()
        while data := connection.recv(RECEIVE_BYTES):
            for body in reader.feed(data):
                command, result = _answer(body, execute)
                connection.sendall(encode_result(result))
                if isinstance(command, Shutdown):
                    return


def _answer(body: bytes, execute: Execute) -> tuple[Command[Any] | None, Result]:
    try:
        command = decode_command(body)
    except ProtocolError as error:
        return None, failed(error)
    return command, execute(command)
