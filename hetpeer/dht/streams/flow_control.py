"""Flow control, the sender's side: how many bytes it may put into a receiver's memory, and what waits. Pure.

Every tensor belongs to a *pool*, a small number. A receiver grants each pool bytes, counted from the link's
beginning and never taken back. A sender states with each frame how many bytes it has spent in that pool and
lane. Both numbers only rise, so lost messages and broken streams do no harm. Bytes are granted again when the
receiver has freed the memory, not when they have arrived.

Pools are of a few kinds that share a budget. A pool waits only for its own tensors to be freed (docs/links.md
says which pools there must be so that nothing waits for itself). Every pool can always have `least` bytes,
the size of its largest frame, under way. grants.py is the receiver's side.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from hetpeer.dht.base.errors import ProtocolError

Pool = int
MAX_POOL = 1 << 10
MAX_BYTES = 1 << 62


class Sendable(Protocol):
    """An item to send: `cost` bytes of its `pool` at the receiver, and a `tag` for `Queue.forget`."""

    @property
    def pool(self) -> Pool:
        """Number of its pool."""

    @property
    def cost(self) -> int:
        """Bytes that it takes up at the receiver."""

    @property
    def tag(self) -> object:
        """Identifies it for `Queue.forget`."""


Item = TypeVar("Item", bound=Sendable)


class GrantQueue(Generic[Item]):
    """Items for one receiver, in order within a pool. Lower pools go first; no pool waits for another."""

    def __init__(self) -> None:
        self._base: tuple[int, ...] = ()
        self._granted: dict[Pool, int] = {}
        self._spent: Counter[Pool] = Counter()
        self._waiting: dict[Pool, deque[Item]] = {}

    def granted(self, base: Iterable[int], pools: Mapping[Pool, int]) -> None:
        """Take in the receiver's grants: `pools` by number, `base` by kind for all pools not in `pools`."""
        old, new = self._base, tuple(base)
        self._base = tuple(map(max, old, new)) if old else new
        for pool, total in pools.items():
            self._granted[pool] = max(self._granted.get(pool, 0), total)

    def add(self, item: Item) -> None:
        """Append `item` to its pool."""
        self._waiting.setdefault(item.pool, deque()).append(item)

    def next(self) -> Item | None:
        """The next item within its pool's grant, removed and counted as spent; None if all have to wait."""
        for pool in sorted(self._waiting):
            item = self._waiting[pool][0]
            if self._spent[pool] + item.cost <= self._limit(pool):
                self._spent[pool] += item.cost
                self._waiting[pool].popleft()
                if not self._waiting[pool]:
                    del self._waiting[pool]
                return item
        return None

    def put_back(self, item: Item) -> None:
        """Return an item that `next` gave and that could not be sent; it is the next one again."""
        self._spent[item.pool] -= item.cost
        self._waiting.setdefault(item.pool, deque()).appendleft(item)

    def forget(self, tag: object) -> None:
        """Drop the items tagged so. Items already sent stay spent until the receiver frees them."""
        left = {pool: deque(i for i in items if i.tag != tag) for pool, items in self._waiting.items()}
        self._waiting = {pool: items for pool, items in left.items() if items}

    def is_short(self, pool: Pool, cost: int) -> bool:
        """Whether another item of `cost` bytes would have to wait."""
        return pool in self._waiting or self._spent[pool] + cost > self._limit(pool)

    @property
    def pools(self) -> list[Pool]:
        """Pools with items that wait for a grant, rising."""
        return sorted(self._waiting)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _limit(self, pool: Pool) -> int:
        if pool in self._granted or not self._base:
            return self._granted.get(pool, 0)
        return self._base[min(pool, len(self._base) - 1)]


# ── on the wire ────────────────────────────────────────────────────────────────────────────────────────────


def pack(totals: Mapping[Pool, int]) -> list[list[int]]:
    """[[pool, total], …] for a frame's header."""
    return [[pool, total] for pool, total in totals.items()]


def unpack(data: Any) -> dict[Pool, int]:
    """Pool → total, as `pack` wrote it at a peer. Raises ProtocolError."""
    if data is None:
        return {}
    if not isinstance(data, list) or len(data) > MAX_POOL:
        raise ProtocolError("a grant that is no list")
    totals: dict[Pool, int] = {}
    for pair in data:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(map(_is_count, pair))
            or pair[0] >= MAX_POOL
        ):
            raise ProtocolError("a grant that is no pairs of numbers")
        totals[pair[0]] = pair[1]
    return totals


def unpack_base(data: Any) -> tuple[int, ...]:
    """The base from a peer, one count for each kind. Raises ProtocolError."""
    if not isinstance(data, list) or not 0 < len(data) <= 16 or not all(map(_is_count, data)):
        raise ProtocolError("a grant without a base")
    return tuple(data)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_BYTES
