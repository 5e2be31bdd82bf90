"""Which stranger gets a stream when all streams for strangers are taken. Pure: times are given.

One network of the internet gets at most a quarter of them, so that the first to come cannot keep out
everybody else. When all are taken, the stream that has been of no use for longest gives way. Docs: links.md.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeVar

SHARE = 4
"""One network may take 1/SHARE of the streams for strangers."""
IDLE_S = 30.0
"""A stream is in use if a payload began or ended in the last so many seconds; beats do not count."""
LONG_S = 120.0
"""A stream gives way after so many seconds in one transfer if no other is idle; the transfer is asked for
again.
"""


class StrangerStream(Protocol):
    """A stranger's stream, as far as its use matters."""

    @property
    def network(self) -> str:
        """The internet network it comes from; empty if none is known."""

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way."""

    @property
    def used_at(self) -> float:
        """When a payload began or ended last, or the stream opened."""


S = TypeVar("S", bound=StrangerStream)


def has_share(network: str, taken: Collection[StrangerStream], most: int) -> bool:
    """Whether `network` may have one more of `most` streams."""
    return not network or sum(seat.network == network for seat in taken) < max(1, most // SHARE)


def gives_way(taken: Collection[S], now: float) -> S | None:
    """The stream that gives way to a new one; None if all are in use."""

    def idle_s(seat: S) -> float:
        return now - seat.used_at - (LONG_S if seat.busy else IDLE_S)

    longest = max(taken, key=idle_s, default=None)
    return longest if longest is not None and idle_s(longest) > 0 else None
