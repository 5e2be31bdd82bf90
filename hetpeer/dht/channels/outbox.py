"""The books of a channel's two sides: what was sent and not acknowledged, and what has come. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hetpeer.dht.streams import flow_control


@dataclass(frozen=True, slots=True)
class Parcel:
    """One frame to be sent: a header of plain data and buffers, which must keep their content until acknowledged."""

    header: Mapping[str, Any]
    payload: tuple[Any, ...] = ()
    tag: object = None
    """What `Outbox.forget` knows it by."""
    pool: flow_control.Pool = 0
    cost: int = 0
    """Bytes of credit that it takes; 0 where the channel has none."""
    done: Callable[[], None] | None = None
    """Called once its buffers are free: it is acknowledged or forgotten, or its channel ends, and is not being sent."""
    depart: Callable[[], Parcel | None] | None = None
    """Gives the parcel that goes in place of this one, which has no payload yet, when its turn comes; None: not now."""

    @property
    def nbytes(self) -> int:
        """Of the payload."""
        return sum(map(len, self.payload))


class Outbox:
    """Frames in the order of their numbers, kept until acknowledged."""

    def __init__(self) -> None:
        self.acknowledged = 0
        self.arrived = 0
        """Bytes of payload in all that was acknowledged."""
        self.spent: Counter[flow_control.Pool] = Counter()
        """Credit that everything added so far takes, whether it is kept or not."""
        self._next = 1
        self._kept: deque[tuple[int, Parcel]] = deque()
        self._totals: dict[int, int] = {}
        self._nbytes = 0
        self._going: Parcel | None = None
        self._let_go = False

    @property
    def nbytes(self) -> int:
        """Of payload in the frames that are kept."""
        return self._nbytes

    def add(self, parcel: Parcel) -> None:
        self._kept.append((self._next, parcel))
        self._nbytes += parcel.nbytes
        if parcel.cost:
            self.spent[parcel.pool] += parcel.cost
            self._totals[self._next] = self.spent[parcel.pool]
        self._next += 1

    def spent_with(self, number: int, parcel: Parcel) -> dict[flow_control.Pool, int]:
        """Credit spent in the pool of frame `number`, that frame and all before it included."""
        return {parcel.pool: self._totals[number]} if parcel.cost else {}

    def acknowledge(self, number: int) -> None:
        """The peer has everything up to `number`."""
        self.acknowledged = max(self.acknowledged, number)
        while self._kept and self._kept[0][0] <= number:
            number_there, parcel = self._kept.popleft()
            self._totals.pop(number_there, None)
            self.arrived += parcel.nbytes
            self._nbytes -= parcel.nbytes
            self._over(parcel)

    def forget(self, tag: object) -> None:
        """Frames tagged so need not arrive any more; the numbers they had are left out."""
        left = [item for item in self._kept if item[1].tag is None or item[1].tag != tag]
        gone = [parcel for _, parcel in self._kept if parcel.tag is not None and parcel.tag == tag]
        self._totals = {number: self._totals[number] for number, _ in left if number in self._totals}
        self._kept = deque(left)
        self._nbytes = sum(parcel.nbytes for _, parcel in left)
        for parcel in gone:
            self._over(parcel)

    def drop(self) -> None:
        """The channel ends: nothing of it will arrive any more."""
        kept, self._kept = self._kept, deque()
        self._nbytes = 0
        for _, parcel in kept:
            self._over(parcel)

    @contextmanager
    def sending(self, parcel: Parcel) -> Iterator[None]:
        """Its buffers are read meanwhile: they are not free before the end of that, whatever becomes of the frame."""
        self._going, self._let_go = parcel, False
        try:
            yield
        finally:
            self._going = None
            if self._let_go:
                self._over(parcel)

    def after(self, number: int) -> tuple[int, Parcel] | None:
        """The first frame with a higher number."""
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
