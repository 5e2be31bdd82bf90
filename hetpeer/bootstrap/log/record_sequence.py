"""Log records as a sequence, independent of where they are kept. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, overload

ROW = 256
"""Records per read when iterating over all."""


class Records(Sequence[Any], ABC):
    """Sequence of records; each access returns a new object."""

    @abstractmethod
    def read(self, begin: int, end: int) -> list[Any]:
        """Records `begin` to `end` - 1; all of them exist."""

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        places = range(len(self))[place]
        if isinstance(places, int):
            return self.read(places, places + 1)[0]
        if places.step == 1:
            return self.read(places.start, max(places.start, places.stop))
        return [self[one] for one in places]

    def __iter__(self) -> Iterator[Any]:
        """All records, including those appended during the iteration."""
        begin = 0
        while row := self[begin : begin + ROW]:
            yield from row
            begin += len(row)
