"""Records of a log in memory, as bytes: they take a fifth of what they take as objects, and are read seldom. Those that
somebody else keeps take next to nothing. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack

from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.record_sequence import Records


class PackedRecords(Records):
    """None is a record, too."""

    def __init__(self, records: Iterable[Record | None] = ()) -> None:
        self._packed: list[bytes | None] = []
        """None: it is on the shelf."""
        self._there = array("Q")
        """Its place there."""
        self._shelf: Sequence[Record] = ()
        self.put(0, records)

    def __len__(self) -> int:
        return len(self._packed)

    def put(self, begin: int, records: Iterable[Record | None]) -> None:
        """The first `begin` ones and then these."""
        self._packed[begin:] = map(msgpack.packb, records)
        self._there[begin:] = array("Q", bytes(8 * (len(self._packed) - begin)))

    def shelve(self, place: int, shelf: Sequence[Record], there: int) -> None:
        """Record `place` is kept by `shelf`, as its record `there`, and read from it. All are on the same shelf."""
        self._shelf = shelf
        self._packed[place] = None
        self._there[place] = there

    def copy(self) -> PackedRecords:
        """The same ones, to go on otherwise."""
        other = PackedRecords()
        other._packed, other._there, other._shelf = self._packed[:], self._there[:], self._shelf
        return other

    def read(self, begin: int, end: int) -> list[Any]:
        return [self._record(place) for place in range(begin, end)]

    def _record(self, place: int) -> Any:
        packed = self._packed[place]
        if packed is None:
            return self._shelf[self._there[place]]
        return msgpack.unpackb(packed, strict_map_key=False)
