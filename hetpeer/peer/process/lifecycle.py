"""A daemon's life: one loop, three signals, an orderly end.

The first SIGINT or SIGTERM asks the daemon to leave; what it then does is bounded in time. The second one
ends the process at once, which is always safe (docs/protocol.md). SIGHUP asks as well, and is never the
second one: kernel, shell and systemd send it one after the other, or right behind a SIGTERM. A process that
ignored SIGHUP at its start (nohup) keeps ignoring it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hetpeer.dht.base import failpoints
from hetpeer.dht.base.errors import ExitCode
from hetpeer.peer.process.console import say

T = TypeVar("T")

MANY_FILES = 1 << 16
"""Open files and connections that a daemon asks the system for: the usual 1,024 are for programs that
`select`.
"""


GENERATIONS = (700, 4, 4)
"""Thresholds of the three generations of the garbage collector: the oldest is collected every 17,500 objects
at the latest.
"""
_M_ARENA_MAX = -8
"""Parameter of mallopt(3)."""


def use_one_heap() -> None:
    """Let all threads share one malloc arena: otherwise each thread that waits for the disk keeps megabytes
    of its own.

    Does nothing without glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def open_many() -> None:
    """Raise the limit of open files of this process and its children, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def freeze_memory() -> None:
    """Exclude the objects that exist now (libraries, the run) from garbage collection, and collect newer ones
    often.

    Ended connections leave cycles of a few small objects around large buffers. The collector waits until a
    quarter more objects exist than at its last full look, so it must start from an empty set.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GENERATIONS)
    gc.collect()


def sweep_memory() -> None:
    """Find also what has become garbage of what was frozen."""
    gc.unfreeze()
    gc.collect()


def run_daemon(main: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """Run `main(leaving)` on its own loop; the first signal sets `leaving`, if `main` has not. Raises
    `LocalError` HP-CONF-002.
    """
    import uvloop

    open_many()
    use_one_heap()
    failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))

    async def with_signals() -> T:
        leaving = asyncio.Event()
        loop = asyncio.get_running_loop()
        before: list[int] = []

        def asked(number: int) -> None:
            if before:
                os._exit(ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED)
            before.append(number)
            leaving.set()

        def hung_up() -> None:
            if not leaving.is_set():
                say(
                    "SIGHUP: its terminal has ended, so it leaves; started with nohup, or as a service, it "
                    "stays"
                )
            leaving.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, asked, number)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, hung_up)
        return await main(leaving)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(with_signals())


async def unless(happens: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T]) -> T | None:
    """Do `work`; once `happens` returns it is cancelled and its end awaited, and None returned."""
    task, happened = asyncio.ensure_future(work), asyncio.ensure_future(happens)
    try:
        await asyncio.wait({task, happened}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        happened.cancel()
        task.cancel()  # no effect when done
        await asyncio.wait({task})
    return None if task.cancelled() else task.result()
