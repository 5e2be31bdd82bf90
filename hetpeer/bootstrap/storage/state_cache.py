"""Copies of files and states that are being given to other peers, within a limit of bytes.

A copy is an open file, or a place in a volunteer's exchange file; pieces of it are in memory. There is one
copy of a thing, however many peers take it. Room that is taken is given up by those who take slowly, not by
those who come: a download below the floor loses its place as soon as somebody else needs it. Peers with a
place in the run, and reliable peers, go before strangers, who share a part of the room.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST_COPIED = 1 << 28
"""Limit in bytes of all copies; raised to OF_THE_LARGEST times the largest copy."""
OF_THE_LARGEST = 4
STRANGERS = 2
"""Copies that only strangers take may have one part in STRANGERS of the limit."""
UNSEEN = 1 << 23
"""Assumed size in bytes of a copy in the making, if no larger one was seen."""
FRESH_S = 20.0
"""Seconds for which a copy is lent to further peers; later its name may stand for other data."""
WINDOW_S, FLOOR = 10.0, 62.5e3
"""Seconds over which the rate of a download is measured, and the floor in bytes/s: a line of 2 Mbit/s carries
four downloads at this rate.
"""
AT_LEAST_S, SLOW = 30.0, 250e3
"""Seconds, and bytes/s: a download that takes longer than both together may be cut when room is short."""

T = TypeVar("T")


class NoRoomError(Exception):
    """There is no room for another copy now."""


@dataclass(slots=True, eq=False)
class Borrower:
    """A download. `cut` ends it; `taken` counts the bytes that its peer has taken; `known`: no stranger."""

    cut: Callable[[], None]
    taken: Callable[[], int]
    known: bool
    _since: float = 0.0
    _before: int = 0
    _slow: bool = False

    def begin(self, now: float) -> None:
        """Measure from `now` on."""
        self._since, self._before = now, self.taken()

    def is_slow(self, now: float) -> bool:
        """Whether its peer took less than FLOOR in the last whole window."""
        if (seconds := now - self._since) >= WINDOW_S:
            self._slow = self.taken() - self._before < FLOOR * seconds
            self.begin(now)
        return self._slow


@dataclass(slots=True, eq=False)
class _Copy(Generic[T]):
    name: str
    made_at: float
    lent_at: float
    data: asyncio.Future[T | None]
    nbytes: int = 0
    borrowers: list[Borrower] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    making: asyncio.Task[None] | None = None

    @property
    def is_strangers(self) -> bool:
        """Whether nobody but strangers takes it."""
        return not any(one.known for one in self.borrowers)

    def gives_way(self, now: float) -> bool:
        """Whether all that take it are slow, or the latest has had more than its time."""
        slow = [one.is_slow(now) for one in self.borrowers]  # all of them are measured
        return (bool(slow) and all(slow)) or now - self.lent_at > AT_LEAST_S + self.nbytes / SLOW


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
        return self._bytes_of(self._copies)

    @asynccontextmanager
    async def lend(self, name: str, borrower: Borrower) -> AsyncIterator[T | None]:
        """Context with the data for `name`, or None if there is none. Raises what `find` raises.

        Raises `NoRoomError` if there is no room for it now. `borrower.cut` is called when the download must
        end to make room.
        """
        now = asyncio.get_running_loop().time()
        copy = self._copy(name, now, known=borrower.known)
        borrower.begin(now)
        copy.borrowers.append(borrower)
        try:
            yield await asyncio.shield(copy.data)
        finally:
            copy.borrowers.remove(borrower)
            if not copy.borrowers:
                self._drop(copy)
                if copy.making is not None and not copy.data.done():
                    copy.making.cancel()

    def _copy(self, name: str, now: float, *, known: bool) -> _Copy[T]:
        """A copy of `name`: a fresh one, or one that is being made. Raises `NoRoomError`."""
        fresh = (one for one in self._copies if one.name == name and now - one.made_at <= FRESH_S)
        if copy := next(fresh, None):
            copy.lent_at = now
            return copy
        self._make_room(name, now, known=known)
        copy = _Copy(name, now, now, asyncio.get_running_loop().create_future())
        self._copies.append(copy)
        copy.making = asyncio.ensure_future(self._make(copy))
        return copy

    def _make_room(self, name: str, now: float, *, known: bool) -> None:
        """Drop copies that give way, until `name` has room, or will have it without older versions.

        A stranger has only the room of strangers. For anybody else strangers' copies give way first, slow or
        not. Raises `NoRoomError`.
        """
        while self.nbytes >= self._most:
            strangers = self._of_strangers()
            slow = [one for one in (strangers if not known else self._copies) if one.gives_way(now)]
            if not (giving := slow or (strangers if known else [])):
                if any(_is_older(one.name, name) for one in self._copies):
                    return
                raise NoRoomError
            self._drop(min(giving, key=lambda one: (not one.is_strangers, one.lent_at)))
        while not known and self._bytes_of(strangers := self._of_strangers()) * STRANGERS >= self._most:
            if not (slow := [one for one in strangers if one.gives_way(now)]):
                if any(_is_older(one.name, name) for one in strangers):
                    return
                raise NoRoomError
            self._drop(min(slow, key=lambda one: one.lent_at))

    def _of_strangers(self) -> list[_Copy[T]]:
        return [one for one in self._copies if one.is_strangers]

    def _bytes_of(self, copies: Iterable[_Copy[T]]) -> int:
        return sum(copy.nbytes or self._largest for copy in copies)

    @property
    def _most(self) -> int:
        return max(MOST_COPIED, OF_THE_LARGEST * self._largest)

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
            for borrower in list(copy.borrowers):
                borrower.cut()
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
