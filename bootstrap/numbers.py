"""A set of numbers that are close together, as those of a log's commits are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet


class Numbers(MutableSet[int]):
    """None is negative. Takes a byte for each number up to the largest one, a set sixty."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._here = bytearray()
        for number in numbers:
            self.add(number)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and 0 <= number < len(self._here) and self._here[number] > 0

    def __iter__(self) -> Iterator[int]:
        return (number for number, here in enumerate(self._here) if here)

    def __len__(self) -> int:
        return self._here.count(1)

    def add(self, number: int) -> None:
        self._here.extend(bytes(max(number + 1 - len(self._here), 0)))
        self._here[number] = 1

    def discard(self, number: int) -> None:
        if number in self:
            self._here[number] = 0
