"""Sequence numbers of a channel: frames sent and not acknowledged, and the last one received. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hetpeer.dht.streams import flow_control


@dataclass(frozen=True, slots=True)
class Parcel:
    """One frame to send: a header of plain data and buffers that must not change until `done`."""

    header: Mapping[str, Any]
    payload: tuple[Any, ...] = ()
    tag: object = None
    """Identifies the frame for `Outbox.forget`."""
    pool: flow_control.Pool = 0
    cost: int = 0
    """Bytes that it takes of the peer's grant; 0 where the channel has none."""
    done: Callable[[], None] | None = None
    """Called once its buffers are free: it is acknowledged, forgotten or its channel ended, and is not being
    sent.
    """
    depart: Callable[[], Parcel | None] | None = None
    """Returns the parcel to send in place of this one, which has no payload yet, when its turn comes; None:
    not now.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum(map(len, self.payload))


class Outbox:
    """Frames in the order of their numbers, kept until acknowledged."""

    def __init__(self) -> None:
        self.acknowledged = 0
        self.arrived = 0
        """Payload bytes of all acknowledged frames."""
        self.spent: Counter[flow_control.Pool] = Counter()
        """Bytes of grants that all frames added so far take, kept or not."""
        self._next = 1
        self._kept: deque[tuple[int, Parcel]] = deque()
        self._totals: dict[int, int] = {}
        self._nbytes = 0
        self._going: Parcel | None = None
        self._let_go = False

    @property
    def nbytes(self) -> int:
        """Payload bytes of the frames that are kept."""
        return self._nbytes

    def add(self, parcel: Parcel) -> None:
        """Append a frame with the next number."""
        self._kept.append((self._next, parcel))
        self._nbytes += parcel.nbytes
        if parcel.cost:
            self.spent[parcel.pool] += parcel.cost
            self._totals[self._next] = self.spent[parcel.pool]
        self._next += 1

    def spent_with(self, number: int, parcel: Parcel) -> dict[flow_control.Pool, int]:
        """Total spent in the pool of frame `number`, up to and including that frame."""
        return {parcel.pool: self._totals[number]} if parcel.cost else {}

    def acknowledge(self, number: int) -> None:
        """Drop the frames up to `number`: the peer has them."""
        self.acknowledged = max(self.acknowledged, number)
        while self._kept and self._kept[0][0] <= number:
            number_there, parcel = self._kept.popleft()
            self._totals.pop(number_there, None)
            self.arrived += parcel.nbytes
            self._nbytes -= parcel.nbytes
            self._over(parcel)

    def forget(self, tag: object) -> None:
        """Drop the frames tagged so; their numbers are skipped."""
        left = [item for item in self._kept if item[1].tag is None or item[1].tag != tag]
        gone = [parcel for _, parcel in self._kept if parcel.tag is not None and parcel.tag == tag]
        self._totals = {number: self._totals[number] for number, _ in left if number in self._totals}
        self._kept = deque(left)
        self._nbytes = sum(parcel.nbytes for _, parcel in left)
        for parcel in gone:
            self._over(parcel)

    def drop(self) -> None:
        """Drop all frames, since the channel ends."""
        kept, self._kept = self._kept, deque()
        self._nbytes = 0
        for _, parcel in kept:
            self._over(parcel)

    @contextmanager
    def sending(self, parcel: Parcel) -> Iterator[None]:
        """Hold the frame's buffers during the block: they are not free before its end, whatever becomes of
        the frame.
        """
        self._going, self._let_go = parcel, False
        try:
            yield
        finally:
            self._going = None
            if self._let_go:
                self._over(parcel)

    def after(self, number: int) -> tuple[int, Parcel] | None:
        """The first frame with a higher number; None if there is none."""
        return next((item for item in self._kept if item[0] > number), None)

    def _over(self, parcel: Parcel) -> None:
        if parcel is self._going:
            self._let_go = True
        elif parcel.done is not None:
            parcel.done()

    def __iter__(self) -> Iterator[tuple[int, Parcel]]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


class Inbox:
    """The highest number received; a frame counts only if its number is higher."""

    def __init__(self) -> None:
        self.last = 0

    def take(self, number: int) -> bool:
        """Whether frame `number` is new; it counts as received from now on."""
        if number <= self.last:
            return False
        self.last = number
        return True
