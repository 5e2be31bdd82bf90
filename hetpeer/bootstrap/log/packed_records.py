"""Log records in memory as bytes, in a fifth of the space of objects; they are read seldom.

A record that another sequence keeps takes next to nothing. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack

from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.record_sequence import Records


class PackedRecords(Records):
    """Packed records in order; None is a valid record."""

    def __init__(self, records: Iterable[Record | None] = ()) -> None:
        self._packed: list[bytes | None] = []
        """Bytes of each record; None: the shelf has it."""
        self._there = array("Q")
        """Position of a shelved record on the shelf."""
        self._shelf: Sequence[Record] = ()
        self.put(0, records)

    def __len__(self) -> int:
        return len(self._packed)

    def put(self, begin: int, records: Iterable[Record | None]) -> None:
        """Keep the first `begin` records and append `records`."""
        self._packed[begin:] = map(msgpack.packb, records)
        self._there[begin:] = array("Q", bytes(8 * (len(self._packed) - begin)))

    def shelve(self, place: int, shelf: Sequence[Record], there: int) -> None:
        """Let `shelf` keep record `place`, as its record `there`.

        All shelved records are on the same shelf.
        """
        self._shelf = shelf
        self._packed[place] = None
        self._there[place] = there

    def copy(self) -> PackedRecords:
        """Independent copy."""
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
