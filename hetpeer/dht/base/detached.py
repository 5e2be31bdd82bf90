"""Work that may hang, in a daemon thread that nothing waits for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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
