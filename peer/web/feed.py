"""The newest view of a swarm for all who look: made once a second while somebody does, now and then otherwise."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from hetpeer.dht.errors import RemoteError

LOOK_S = 1.0
IDLE_S = 10.0
"""Between two looks while nobody watches: curves and events go on."""
MAX_WATCHERS = 16

_log = logging.getLogger(__name__)


class Feed:
    """Views made by `look`, which may raise `RemoteError`: then the last one stands."""

    def __init__(self, look: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._look = look
        self._newest: str | None = None
        self._news = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._watchers = 0
        self._closed = False

    @property
    def is_full(self) -> bool:
        """Whether no more may watch."""
        return self._watchers >= MAX_WATCHERS

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
            view = json.dumps(await self._look(), separators=(",", ":"), allow_nan=False)
        except RemoteError as error:
            _log.debug("no new view: %s", error)
            return
        async with self._news:
            self._newest = view
            self._news.notify_all()

    async def close(self) -> None:
        """Whoever watches has seen all: their streams end, so that the server can."""
        self._closed = True
        async with self._news:
            self._news.notify_all()

    def look_now(self) -> None:
        """Something has just changed here: do not wait for the next look."""
        self._wanted.set()

    @property
    def newest(self) -> str | None:
        """The newest view as JSON; None before the first one."""
        return self._newest

    async def watch(self) -> AsyncIterator[str]:
        """Each new view as JSON, beginning with the newest; who is slow misses some."""
        self._watchers += 1
        self._wanted.set()
        try:
            shown: str | None = None
            while True:
                async with self._news:
                    while not self._closed and (self._newest is shown or self._newest is None):
                        await self._news.wait()
                    if self._closed or self._newest is None:
                        return
                    shown = self._newest
                yield shown
        finally:
            self._watchers -= 1

    async def _pause(self) -> None:
        """Until the next look is due, or wanted."""
        try:
            async with asyncio.timeout(LOOK_S if self._watchers else IDLE_S):
                await self._wanted.wait()
        except TimeoutError:
            return
