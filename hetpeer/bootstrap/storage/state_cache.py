"""Copies of states that are being sent: one copy per state, however many peers take it, within a memory
limit.

A slow receiver occupies a copy. When memory is short, a request for another state evicts older versions of
the same state, and copies in use for longer than a link of 2 Mbit/s needs. Docs: links.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST = 1 << 28
"""Limit in bytes of all copies; raised to OF_THE_LARGEST times the largest copy."""
OF_THE_LARGEST = 4
UNSEEN = 1 << 23
"""Assumed size in bytes of a copy in the making, if no larger one was seen."""
FRESH_S = 20.0
"""Seconds for which a copy is lent to further peers; later its name may stand for other data."""
AT_LEAST_S, SLOW = 30.0, 250e3
"""Seconds, and bytes/s: a transfer slower than both together may be cut when memory is short."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Copy(Generic[T]):
    name: str
    made_at: float
    lent_at: float
    data: asyncio.Future[T | None]
    nbytes: int = 0
    borrowers: dict[object, Callable[[], None]] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    making: asyncio.Task[None] | None = None

    def overdue_s(self, now: float) -> float:
        """Seconds by which the latest transfer exceeds its allowed duration; negative: not exceeded."""
        return now - self.lent_at - AT_LEAST_S - self.nbytes / SLOW


class StateCache(Generic[T]):
    """Cache of `find`'s results, which keeps data in place while its context is open; `size` gives bytes."""

    def __init__(
        self, find: Callable[[str], AbstractAsyncContextManager[T | None]], size: Callable[[T], int]
    ) -> None:
        self._find = find
        self._size = size
        self._copies: list[_Copy[T]] = []
        self._largest = UNSEEN

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.nbytes or self._largest for copy in self._copies)

    @asynccontextmanager
    async def lend(self, name: str, cut: Callable[[], None]) -> AsyncIterator[T | None]:
        """Context with the data for `name`, or None if there is none or no room. Raises what `find` raises.

        `cut` is called when the transfer must end to make room.
        """
        copy = self._copy(name, asyncio.get_running_loop().time())
        if copy is None:
            yield None
            return
        borrower = object()
        copy.borrowers[borrower] = cut
        try:
            yield await asyncio.shield(copy.data)
        finally:
            del copy.borrowers[borrower]
            if not copy.borrowers:
                self._drop(copy)
                if copy.making is not None and not copy.data.done():
                    copy.making.cancel()

    def _copy(self, name: str, now: float) -> _Copy[T] | None:
        """A copy of `name`: a fresh one, or one that is being made; None if there is no room."""
        fresh = (one for one in self._copies if one.name == name and now - one.made_at <= FRESH_S)
        if copy := next(fresh, None):
            copy.lent_at = now
            return copy
        if not self._makes_room(name, now):
            return None
        copy = _Copy(name, now, now, asyncio.get_running_loop().create_future())
        self._copies.append(copy)
        copy.making = asyncio.ensure_future(self._make(copy))
        return copy

    def _makes_room(self, name: str, now: float) -> bool:
        """Evict overdue copies until there is room for `name`.

        Returns whether it may be copied: there is room, or earlier versions are evicted once it is there.
        """
        while self.nbytes >= self._most:
            slowest = max(self._copies, key=lambda one: one.overdue_s(now))
            if slowest.overdue_s(now) <= 0:
                return any(_is_older(one.name, name) for one in self._copies)
            self._drop(slowest)
        return True

    @property
    def _most(self) -> int:
        return max(MOST, OF_THE_LARGEST * self._largest)

    def _made(self, copy: _Copy[T], data: T) -> None:
        copy.nbytes = self._size(data)
        self._largest = max(self._largest, copy.nbytes)
        older = sorted(
            (one for one in self._copies if _is_older(one.name, copy.name)), key=lambda one: one.made_at
        )
        for one in older:
            if self.nbytes - copy.nbytes >= self._most:
                self._drop(one)

    def _drop(self, copy: _Copy[T]) -> None:
        if copy in self._copies:
            self._copies.remove(copy)
            for cut in list(copy.borrowers.values()):
                cut()
        copy.over.set()

    async def _make(self, copy: _Copy[T]) -> None:
        """Make `copy`, and keep its data in place until the copy is over."""
        try:
            async with self._find(copy.name) as data:
                if data is not None:
                    self._made(copy, data)
                elif copy in self._copies:
                    self._copies.remove(copy)  # the next request may find it
                copy.data.set_result(data)
                await copy.over.wait()
        except Exception as error:
            if copy.data.done():
                raise
            copy.data.set_exception(error)
            copy.data.exception()  # retrieved, since the asker may be gone


def _is_older(name: str, than: str) -> bool:
    """Whether `name` is an earlier version than `than` of the same block's state."""
    one, other = name.split("/"), than.split("/")
    if not one[0] == other[0] == "state" or not len(one) == len(other) == 4:
        return False
    if not all(map(str.isdecimal, (one[2], other[2]))):
        return False
    return (one[1], one[3]) == (other[1], other[3]) and int(one[2]) < int(other[2])
