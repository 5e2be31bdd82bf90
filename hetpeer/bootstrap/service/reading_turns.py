"""Turns of peers to have a message read, so that reading leaves the event loop half of its time.

Reading a message is one piece of work for the loop: decoding it, and the core's answer. While reading has
used up its share (`ALL_READING`), messages wait, and the peer that has used least lately is first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from hetpeer.bootstrap.service.rate_limit import ALL_READING, RateLimit, TokenLevel
from hetpeer.dht.base.runtime import Clock


class ReadingTurns:
    """All turns of one term."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._together = TokenLevel(*ALL_READING, clock.monotonic())
        self._waiting: dict[asyncio.Future[None], RateLimit] = {}
        self._timer: asyncio.Handle | None = None

    async def turn(self, limit: RateLimit) -> None:
        """Return when a message of the peer with `limit` may be read, at once: nothing must be awaited."""
        if not self._waiting and not self._together.wait(self._clock.monotonic()):
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting[mine] = limit
        self._look_later()
        try:
            await mine
        finally:
            self._waiting.pop(mine, None)

    @contextmanager
    def reading(self, limit: RateLimit) -> Iterator[None]:
        """Charge the processor time of the block to the peer, and to all peers together."""
        began = self._clock.thread()
        try:
            yield
        finally:
            used = self._clock.thread() - began
            limit.took(used, self._clock.monotonic())
            self._together.take(used)

    def _look_later(self) -> None:
        if self._timer is None:
            wait = self._together.wait(self._clock.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait, self._look)

    def _look(self) -> None:
        """Give the next turn if there is one to give, and look again once that message is read."""
        self._timer, now = None, self._clock.monotonic()
        waiting = [mine for mine in self._waiting if not mine.done()]
        if not waiting:
            return
        if not self._together.wait(now):
            min(waiting, key=lambda mine: self._waiting[mine].recent(now)).set_result(None)
        self._look_later()
