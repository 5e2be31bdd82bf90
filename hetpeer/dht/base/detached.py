"""Work that may hang, in a thread that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def aside(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """What `work` gives or raises, from a thread of its own. Where `work` hangs, so does this, but neither the loop nor the end of the process:
    unlike those of `asyncio.to_thread`, its thread is waited for by nobody.
    """
    loop = asyncio.get_running_loop()
    given: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised to whoever waits
            tell(given.set_exception, error)
        else:
            tell(given.set_result, result)

    def tell(answer: Callable[..., None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if given.done() else answer(value))

    threading.Thread(target=run, name=name, daemon=True).start()
    return given
