"""A daemon's life: one loop, three signals, an orderly end; its memory, files and cores; a sleep.

The first SIGINT or SIGTERM asks the daemon to leave; what it then does is bounded in time. The second one
ends the process at once, which is always safe (docs/protocol.md). SIGHUP asks as well, and is never the
second one: kernel, shell and systemd send it one after the other, or right behind a SIGTERM. A process that
ignored SIGHUP at its start (nohup) keeps ignoring it.

Streams do not notice a suspended machine, because all their time-outs count running time (docs/daemon.md).
`watch_sleep` compares the clock of running time with the one that runs on during a suspend.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from hetpeer.dht.base import failpoints
from hetpeer.dht.base.errors import ExitCode
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.peer.process.console import say

T = TypeVar("T")

MANY_FILES = 1 << 16
"""Limit of open files and connections that a daemon asks for; the usual 1,024 is only there for `select`."""
GENERATIONS = (700, 4, 4)
"""Thresholds of the three GC generations: the oldest is collected after 17,500 objects at the latest."""
_M_ARENA_MAX = -8
"""Parameter of mallopt(3)."""
SLEEP_LOOK_S = 1.0
SLEPT_S = 10.0
"""Seconds after which other peers have given us up: a volunteer's lease."""
ALLOWED_CORES = frozenset(os.sched_getaffinity(0))
"""Cores that this process had at its start."""

_log = logging.getLogger(__name__)


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


def run_daemon(main: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """Run `main(leaving)` on a new loop; the first signal sets `leaving`. Raises `LocalError` HP-CONF-002."""
    import uvloop

    open_many()
    use_one_heap()
    if places := os.environ.get(failpoints.VARIABLE):
        failpoints.arm(places)

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


class Sleep:
    """Pure. Both clocks in seconds, as they were when it began."""

    def __init__(self, monotonic: float, boottime: float) -> None:
        self._ahead = boottime - monotonic

    def look(self, monotonic: float, boottime: float) -> float:
        """Seconds for which the machine has slept since the last look."""
        before, self._ahead = self._ahead, boottime - monotonic
        return max(0.0, self._ahead - before)


async def watch_sleep(clock: SystemClock, woken: Callable[[], Awaitable[None]]) -> None:
    """Call `woken` after each sleep of SLEPT_S or more. Raises what that raises."""
    sleep = Sleep(clock.monotonic(), clock.boottime())
    while True:
        await asyncio.sleep(SLEEP_LOOK_S)
        slept_s = sleep.look(clock.monotonic(), clock.boottime())
        if slept_s >= SLEPT_S:
            _log.warning("this machine slept for %.0f s: joining again as a new volunteer", slept_s)
            await woken()


def chosen_cores(count: int, allowed: frozenset[int] = ALLOWED_CORES) -> frozenset[int]:
    """`count` of the cores, all for 0. The last ones: interrupts mostly go to the first. Pure."""
    return frozenset(sorted(allowed)[-count:]) if count else allowed


def restrict_cores(count: int) -> None:
    """Let this process and its children, all threads included, use `count` cores; 0: all."""
    cores = chosen_cores(count)
    done: set[int] = set()
    while new := set(_threads()) - done:  # a thread that was just made may have come from one not yet done
        for thread in new:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)
        done |= new


def _threads() -> Iterator[int]:
    """All threads of this process and its children."""
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield from (int(thread.name) for thread in Path(f"/proc/{process.pid}/task").iterdir())
