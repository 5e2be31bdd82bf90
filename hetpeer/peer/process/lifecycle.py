"""A daemon's life: one loop, three signals, an orderly end.

The first SIGINT or SIGTERM asks the daemon to leave; what it then does is bounded in time. The second one ends the
process at once, which is always safe (docs/protocol.md). SIGHUP asks as well, and is never the second one: kernel, shell
and systemd send it one after the other, or right behind a SIGTERM. Who ignores it from the start (nohup) goes on to.
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
"""Files and connections that a daemon may have open, where the system lets it: the usual limit (1,024) is for programs that `select`."""


GENERATIONS = (700, 4, 4)
"""Objects more than were freed until the collector looks at the youngest; so many times that at the older ones, and those at all: every 17,500 at the latest."""
_M_ARENA_MAX = -8
"""Of mallopt(3)."""


def use_one_heap() -> None:
    """All threads take memory from one place: else each of the few that wait for the disk keeps megabytes of its own. Where there is no glibc nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def open_many() -> None:
    """Raise this process's own limit of open files, and that of the processes which it starts, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def freeze_memory() -> None:
    """What is here now is here to stay: libraries, the run. The collector looks at what comes from now on alone, and therefore often: connections that end leave circles of
    a few small objects around large buffers. It waits until there is a quarter more than it saw the last time, so it has to see that nothing is left.
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
    """Run `main(leaving)` on a loop of its own; `leaving` is set by the first signal, if not by itself before. Raises `LocalError` HP-CONF-002."""
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
                    "SIGHUP: its terminal has ended, so it leaves; started with nohup, or as a service, it stays"
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
