"""Who may have a stream with us where strangers have had all that are for them. Pure: times are given.

Whoever takes them first must not keep everybody else out: one network of the internet gets a quarter of them, and when all are taken the
one goes that has been of no use for longest. Docs: links.md.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeVar

SHARE = 4
"""Networks that it takes to have all streams which are for strangers."""
IDLE_S = 30.0
"""Over a stream that is of use something has come or gone since then, beside words that the peer is alive. A state may be waited for."""
LONG_S = 120.0
"""Where one thing has been under way for so long, its stream gives way, too, if none is idle: it is asked for again."""


class StrangerStream(Protocol):
    """A stranger's stream."""

    @property
    def network(self) -> str:
        """Where it comes from; empty if that is no network of the internet."""

    @property
    def busy(self) -> bool:
        """Whether something is under way over it."""

    @property
    def used_at(self) -> float:
        """When a payload began or ended last, or the stream did."""


S = TypeVar("S", bound=StrangerStream)


def has_share(network: str, taken: Collection[StrangerStream], most: int) -> bool:
    """Whether one more from `network` leaves enough for others, of `most` in all."""
    return not network or sum(seat.network == network for seat in taken) < max(1, most // SHARE)


def gives_way(taken: Collection[S], now: float) -> S | None:
    """Whose place the next one gets, if anybody's."""

    def idle_s(seat: S) -> float:
        return now - seat.used_at - (LONG_S if seat.busy else IDLE_S)

    longest = max(taken, key=idle_s, default=None)
    return longest if longest is not None and idle_s(longest) > 0 else None
