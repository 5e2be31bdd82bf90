"""How fast a node may send and receive, in all its streams together, and how much it has (docs/limits.md)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

from hetpeer.dht.base.token_bucket import BURST_S, TokenBucket

MIN_PIECE, MAX_PIECE = 1 << 12, 1 << 18


class ThrottledDirection:
    """One direction. Bytes count from the start of the node."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._bucket = TokenBucket()

    @property
    def unlimited(self) -> bool:
        return math.isinf(self._bucket.rate)

    def limit(self, rate: float) -> None:
        """Bytes/s from now on, also for what is under way; infinite: none."""
        self._bucket.change(rate, _now())

    def passed(self, nbytes: int) -> None:
        """Bytes that do not wait, but are owed."""
        self.nbytes += nbytes
        self._bucket.spend(nbytes, _now())

    async def turn(self, nbytes: int) -> None:
        """Wait until so many bytes may go."""
        self.nbytes += nbytes
        wait_s = self._bucket.spend(nbytes, _now())
        if wait_s:
            await asyncio.sleep(wait_s)

    def pieces(self, view: memoryview) -> Iterator[memoryview]:
        """`view` in parts that each have their turn, of a size for the rate at that time."""
        while len(view):
            share = int(min(self._bucket.rate * BURST_S, MAX_PIECE))
            size = max(MIN_PIECE, share)
            yield view[:size]
            view = view[size:]


class Throttle:
    """Of one node."""

    def __init__(self) -> None:
        self.up = ThrottledDirection()
        self.down = ThrottledDirection()


def _now() -> float:
    return asyncio.get_running_loop().time()
