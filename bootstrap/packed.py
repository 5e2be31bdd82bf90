"""Records of a log in memory, as bytes: a long run's log takes a fifth of what it takes as objects, and is read seldom. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import msgpack

from hetpeer.bootstrap.history import Record


class PackedRecords(Sequence[Any]):
    """Records in order, each made anew whenever it is read: whoever keeps one keeps it alone. None is one, too."""

    def __init__(self, records: Iterable[Record | None] = ()) -> None:
        self._packed: list[bytes] = []
        self.put(0, records)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return [_unpacked(one) for one in self._packed[place]]
        return _unpacked(self._packed[place])

    def __iter__(self) -> Iterator[Any]:
        return map(_unpacked, self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def append(self, record: Record | None) -> None:
        """One more."""
        self._packed.append(msgpack.packb(record))

    def put(self, begin: int, records: Iterable[Record | None]) -> None:
        """The first `begin` ones and then these."""
        self._packed[begin:] = map(msgpack.packb, records)

    def take(self, place: int, others: PackedRecords, there: int) -> None:
        """Record `place`, the last one or a new one behind it, is the other's: both have the same bytes."""
        self._packed[place : place + 1] = [others._packed[there]]

    def copy(self) -> PackedRecords:
        """The same ones, to go on otherwise."""
        other = PackedRecords()
        other._packed = self._packed[:]
        return other


def _unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)
