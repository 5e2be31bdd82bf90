"""Foundations of every process: the clocks, tasks with an owner, threads, children and temporary folders.

Only this module reads the machine's clocks; the simulator passes a clock of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hetpeer.dht.base.errors import LocalError, RemoteError

R = TypeVar("R")
T = TypeVar("T")
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


class Clock(Protocol):
    """Clocks in seconds: `monotonic` for durations, `wall` (since 1970) for the expiry of records, `thread`
    for processor time.
    """

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""

    def wall(self) -> float:
        """Seconds since 1970."""

    def thread(self) -> float:
        """Processor seconds that the calling thread has used."""


class SystemClock:
    """The machine's own clocks."""

    monotonic = staticmethod(time.monotonic)
    """Seconds since boot, without the time in which the machine was suspended."""
    thread = staticmethod(time.thread_time)
    """Processor seconds that the calling thread has used."""

    def wall(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def boottime(self) -> float:
        """Seconds since boot, including the time in which the machine was suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


async def to_its_end(function: Callable[..., R], *arguments: Any) -> R:
    """`function(*arguments)` in a thread; if cancelled, wait for it, so that no file is closed under it."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def going_on(work: Coroutine[Any, Any, R]) -> Coroutine[Any, Any, R]:
    """Begin `work` now; await the returned coroutine for its end.

    The work goes on if nobody awaits it or the waiter is cancelled; then its errors are ignored.
    """
    running = asyncio.ensure_future(work)
    running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def wait() -> R:
        return await asyncio.shield(running)

    return wait()


def heed_cancellation() -> None:
    """Raise `CancelledError` if the current task was cancelled while a task group ended with caught errors.

    Call it after `except*` around a group. Python 3.11 and 3.12 forget such a cancellation, and a
    caller that awaits this task would wait for ever. The group's body must not end before its tasks do: a
    group does not take back a cancellation of its own that comes after that.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class TaskSet:
    """Tasks that live at most as long as their owner.

    A `RemoteError` is logged at debug level and ends only its task. Any other error goes to `on_error`
    (default: the log). Example:

        tasks = TaskSet()
        tasks.spawn(serve(stream), name="incoming stream")
        await tasks.close()  # cancels and awaits all of them
    """

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_error = on_error

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Run `work` until it ends or the set is closed."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def close(self) -> None:
        """Cancel all tasks and return when each has ended, also those that their cleanup spawns."""
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        """Log how a task ended; an error other than `RemoteError` goes to `on_error`, if there is one."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RemoteError):
            _log.debug("%s ended: %s", task.get_name(), error)
        elif error is not None and self._on_error is not None:
            self._on_error(error)
        elif isinstance(error, LocalError):
            _log.error("%s ended: %s", task.get_name(), error)
        elif error is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)


def aside(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Run `work` in a new daemon thread; the future holds its result or its exception.

    If `work` hangs, the future stays open, but neither the loop nor the end of the process is held up. This
    is the difference to `asyncio.to_thread`, whose threads are joined at exit.
    """
    loop = asyncio.get_running_loop()
    given: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - handed to the caller through the future
            tell(given.set_exception, error)
        else:
            tell(given.set_result, result)

    def tell(answer: Callable[..., None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if given.done() else answer(value))

    threading.Thread(target=run, name=name, daemon=True).start()
    return given


# looked up before any fork: a child must not take the loader's lock
_libc = ctypes.CDLL(None, use_errno=True)


def dying_with_us() -> Callable[[], None]:
    """A `preexec_fn` for subprocess: the kernel kills the child when the thread that starts it ends.

    Start such children from the main thread. The function makes two system calls and takes no lock, so it is
    safe after a fork.
    """
    parent = os.getpid()

    def die_with_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the prctl above
            os._exit(1)

    return die_with_parent


# Machines may share the folder for temporary files, but not its locks.
_PREFIX = f"hetpeer-{hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:6]}-"


def process_folder(purpose: str) -> tempfile.TemporaryDirectory[str]:
    """A new temporary folder, closed to other users and locked (flock) until it is removed. Raises OSError.

    A killed process cannot remove its folders. So before one is made, this user's folders that no process
    locks are removed.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is in use, or already gone
            if path.lstat().st_uid == os.getuid():
                lock = _lock(path, fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
    folder = tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{purpose}-", ignore_cleanup_errors=True)
    with contextlib.suppress(OSError):  # a file system without locks: nobody else removes the folder either
        weakref.finalize(folder, os.close, _lock(Path(folder.name)))
    # Another process may have removed it before it was locked.
    return folder if Path(folder.name).exists() else process_folder(purpose)


def _lock(folder: Path, how: int = 0) -> int:
    """Lock `folder` until the returned descriptor is closed. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
