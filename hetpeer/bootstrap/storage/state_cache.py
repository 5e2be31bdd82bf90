"""What is being given to others at the moment: each thing once, however many take it, and no more than there is memory for.

Who takes a thing slowly holds the copy of it, so in the place of an old one comes a new one when somebody asks for something else: the
versions of a state before the one that is asked for, and whatever has been under way for longer than a line of 2 Mbit/s needs. Docs: links.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST = 1 << 28
"""Bytes of all copies; more where a few of the largest thing here take more."""
OF_THE_LARGEST = 4
UNSEEN = 1 << 23
"""Bytes that a copy which is being made is taken to have, where none was larger."""
FRESH_S = 20.0
"""A copy is lent to others for so long: after that what goes by its name may be something else."""
AT_LEAST_S, SLOW = 30.0, 250e3
"""Who takes longer than the first and the bytes at the second (bytes/s) gives way to others where there is no room."""

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
        """For how long somebody may have had it by now that began last and is no slower than most; below 0: not yet."""
        return now - self.lent_at - AT_LEAST_S - self.nbytes / SLOW


class StateCache(Generic[T]):
    """What `find` gives, which keeps it in place for as long as its context is open; `size` says how many bytes that takes."""

    def __init__(
        self, find: Callable[[str], AbstractAsyncContextManager[T | None]], size: Callable[[T], int]
    ) -> None:
        self._find = find
        self._size = size
        self._copies: list[_Copy[T]] = []
        self._largest = UNSEEN

    @property
    def nbytes(self) -> int:
        """Of all copies."""
        return sum(copy.nbytes or self._largest for copy in self._copies)

    @asynccontextmanager
    async def lend(self, name: str, cut: Callable[[], None]) -> AsyncIterator[T | None]:
        """`name`, or None if it is not to be had, or there is no room for it now. `cut` ends what is done with it: somebody else's turn has come.

        Raises what `find` raises.
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
        """Whether `name` may be copied: there is room, overdue ones have made it, or earlier versions will, once it turns out to be there."""
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
        try:
            async with self._find(copy.name) as data:
                if data is not None:
                    self._made(copy, data)
                elif copy in self._copies:
                    self._copies.remove(copy)  # whoever asks next may find it there
                copy.data.set_result(data)
                await copy.over.wait()
        except Exception as error:
            if copy.data.done():
                raise
            copy.data.set_exception(error)
            copy.data.exception()  # whoever asked may be gone


def _is_older(name: str, than: str) -> bool:
    """Whether both are states of the same block, and the first is of an earlier version."""
    one, other = name.split("/"), than.split("/")
    if not one[0] == other[0] == "state" or not len(one) == len(other) == 4:
        return False
    if not all(map(str.isdecimal, (one[2], other[2]))):
        return False
    return (one[1], one[3]) == (other[1], other[3]) and int(one[2]) < int(other[2])
