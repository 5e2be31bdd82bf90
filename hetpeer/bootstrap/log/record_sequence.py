"""Records of a log as a sequence, wherever they are kept. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, overload

ROW = 256
"""Records that are read at a time by who reads all of them."""


class Records(Sequence[Any], ABC):
    """Records in order, each made anew whenever it is read: whoever keeps one keeps it alone."""

    @abstractmethod
    def read(self, begin: int, end: int) -> list[Any]:
        """Those from `begin` to before `end`, which there are."""

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
        """Those that are there, and those that come meanwhile."""
        begin = 0
        while row := self[begin : begin + ROW]:
            yield from row
            begin += len(row)
