"""The newest view of a swarm for all who look: made once a second while somebody does, now and then otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

LOOK_S = 1.0
GAP_S = 0.25
"""Between two looks at least, however much happens."""
IDLE_S = 10.0
"""Between two looks while nobody watches: events go on, and nobody is asked for what is in the log."""
SHOWN_S = 30.0
"""Who was shown one view is taken for somebody who watches for so long."""
MAX_WATCHERS = 16

_log = logging.getLogger(__name__)


class ViewFeed:
    """Views made by `look`, which is told whether somebody watches. Where it fails the last one stands, and the log says why."""

    def __init__(self, look: Callable[[bool], Awaitable[dict[str, Any]]]) -> None:
        self._look = look
        self._newest: str | None = None
        self._news = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._watchers = 0
        self._shown_at = -math.inf
        self._closed = False
        self._failure = ""
        """Of the last look, if it failed: told once."""

    @contextlib.contextmanager
    def seat(self) -> Iterator[bool]:
        """A place to `watch` from, while the context is open; its value is whether one was free."""
        if self._watchers >= MAX_WATCHERS:
            yield False
            return
        self._watchers += 1
        self._wanted.set()
        try:
            yield True
        finally:
            self._watchers -= 1

    @property
    def _is_watched(self) -> bool:
        return self._watchers > 0 or time.monotonic() - self._shown_at < SHOWN_S

    async def run(self) -> None:
        """Look for ever. If that ends, it is closed."""
        try:
            while True:
                self._wanted.clear()
                await self._renew()
                await self._pause()
        finally:
            await self.close()

    async def _renew(self) -> None:
        try:
            view = json.dumps(await self._look(self._is_watched), separators=(",", ":"), allow_nan=False)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next view may be one, and nobody would renew it otherwise
            if repr(error) != self._failure:
                _log.error("no new view of the swarm", exc_info=error)
            self._failure = repr(error)
            return
        self._failure = ""
        async with self._news:
            self._newest = view
            self._news.notify_all()

    async def close(self) -> None:
        """Whoever watches has seen all: their streams end, so that the server can."""
        self._closed = True
        async with self._news:
            self._news.notify_all()

    def look_now(self) -> None:
        """Something has just changed here: whoever watches does not wait for the next look."""
        if self._is_watched:
            self._wanted.set()

    @property
    def newest(self) -> str | None:
        """The newest view as JSON; None before the first one."""
        return self._newest

    def shown(self) -> str | None:
        """The same for somebody who asks, and will perhaps again: for SHOWN_S that is watching, too."""
        if not self._is_watched:
            self._wanted.set()
        self._shown_at = time.monotonic()
        return self._newest

    async def watch(self) -> AsyncIterator[str]:
        """Each new view as JSON, beginning with the newest; who is slow misses some. To be iterated from a `seat`."""
        shown: str | None = None
        while True:
            async with self._news:
                while not self._closed and (self._newest is shown or self._newest is None):
                    await self._news.wait()
                if self._closed or self._newest is None:
                    return
                shown = self._newest
            yield shown

    async def _pause(self) -> None:
        """Until the next look is due, or wanted."""
        await asyncio.sleep(GAP_S)
        try:
            async with asyncio.timeout((LOOK_S if self._is_watched else IDLE_S) - GAP_S):
                await self._wanted.wait()
        except TimeoutError:
            return
