"""Limits on what a node sends and receives in all its streams together, with byte counts (docs/limits.md)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

from hetpeer.dht.base.token_bucket import BURST_S, TokenBucket

MIN_PIECE, MAX_PIECE = 1 << 12, 1 << 18


class ThrottledDirection:
    """Limit and byte count of one direction, since the start of the node."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._bucket = TokenBucket()

    @property
    def unlimited(self) -> bool:
        """Whether no limit is set."""
        return math.isinf(self._bucket.rate)

    def limit(self, rate: float) -> None:
        """Set the limit in bytes/s, also for transfers under way; infinite: none."""
        self._bucket.change(rate, _now())

    def passed(self, nbytes: int) -> None:
        """Count bytes that do not wait; later ones wait for them."""
        self.nbytes += nbytes
        self._bucket.spend(nbytes, _now())

    async def turn(self, nbytes: int) -> None:
        """Wait until `nbytes` may go."""
        self.nbytes += nbytes
        wait_s = self._bucket.spend(nbytes, _now())
        if wait_s:
            await asyncio.sleep(wait_s)

    def pieces(self, view: memoryview) -> Iterator[memoryview]:
        """Parts of `view` that each take their turn, sized for the rate at that time."""
        while len(view):
            share = int(min(self._bucket.rate * BURST_S, MAX_PIECE))
            size = max(MIN_PIECE, share)
            yield view[:size]
            view = view[size:]


class Throttle:
    """Both directions of one node."""

    def __init__(self) -> None:
        self.up = ThrottledDirection()
        self.down = ThrottledDirection()


def _now() -> float:
    return asyncio.get_running_loop().time()
