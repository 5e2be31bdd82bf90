"""A set of background tasks with an owner: none outlives `close`, and none fails unheard. And work that is not left half done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hetpeer.dht.base.errors import LocalError, RemoteError

R = TypeVar("R")

_log = logging.getLogger(__name__)


async def to_its_end(function: Callable[..., R], *arguments: Any) -> R:
    """`function` in a thread. Cancelled, it is cancelled when the function has returned: nobody closes a file under it."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def going_on(work: Coroutine[Any, Any, R]) -> Coroutine[Any, Any, R]:
    """Begin `work` now; await what this returns for its end. It goes on if nobody does, or who does is cancelled, and is then
    unheard, also when it fails.
    """
    running = asyncio.ensure_future(work)
    running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def wait() -> R:
        return await asyncio.shield(running)

    return wait()


def heed_cancellation() -> None:
    """To be called after a group of tasks whose errors were caught: raises `CancelledError` if we were cancelled while the group ended for one of them. Python 3.11 and 3.12 forget that,
    and whoever waits for us would wait for ever. The group's body must not end before its tasks do: they do not take back what they cancel when one of them fails after that.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class TaskSet:
    """Tasks that live as long as their owner at most. A peer's fault is noted at debug level, and so ends one task only;
    anything else is told to `on_error`, by default the log.
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
        """Cancel all tasks and wait until each has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._tasks)

    def _finished(self, task: asyncio.Task[Any]) -> None:
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
