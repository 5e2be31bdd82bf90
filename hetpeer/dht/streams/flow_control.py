"""Credit: how many bytes a sender may put into a receiver's memory, and who waits for what. Pure.

What is sent belongs to a *pool*, a small number. A receiver grants each pool bytes, counted from the link's beginning and
never taken back; a sender says with each frame how many it has spent in that pool and lane. Both numbers only rise, so it
does not matter which of them get lost, and a broken stream changes nothing. What is spent comes back when the receiver
has no use for the memory any more, not when the bytes have arrived.

Pools are of a few kinds that share a budget. A pool waits for nothing but its own tensors to be done with (which pools
there have to be, so that nothing can wait for itself, is said in docs/links.md), and every pool can always have `least`,
the largest frame that there is in it, under way. Here is the sender's side; the receiver's is grants.py.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from hetpeer.dht.base.errors import ProtocolError

Pool = int
MAX_POOL = 1 << 10
MAX_BYTES = 1 << 62


class Sent(Protocol):
    """What waits to be sent: bytes that it will take up at the receiver, and what `forget` knows it by."""

    @property
    def pool(self) -> Pool: ...

    @property
    def cost(self) -> int: ...

    @property
    def tag(self) -> object: ...


Item = TypeVar("Item", bound=Sent)


class Queue(Generic[Item]):
    """What is to go to one receiver, in order within a pool; lower pools go first, and none waits for another."""

    def __init__(self) -> None:
        self._base: tuple[int, ...] = ()
        self._granted: dict[Pool, int] = {}
        self._spent: Counter[Pool] = Counter()
        self._waiting: dict[Pool, deque[Item]] = {}

    def granted(self, base: Iterable[int], pools: Mapping[Pool, int]) -> None:
        """The receiver says so: `base` for pools of each kind that are not in `pools`."""
        old, new = self._base, tuple(base)
        self._base = tuple(map(max, old, new)) if old else new
        for pool, total in pools.items():
            self._granted[pool] = max(self._granted.get(pool, 0), total)

    def add(self, item: Item) -> None:
        self._waiting.setdefault(item.pool, deque()).append(item)

    def next(self) -> Item | None:
        """The next that may go, taken off and counted as spent."""
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
        """`next` gave it, and it could not go: it is the next one again."""
        self._spent[item.pool] -= item.cost
        self._waiting.setdefault(item.pool, deque()).appendleft(item)

    def forget(self, tag: object) -> None:
        """Those tagged so need not go any more. What has gone already stays spent: the receiver gives it back."""
        left = {pool: deque(i for i in items if i.tag != tag) for pool, items in self._waiting.items()}
        self._waiting = {pool: items for pool, items in left.items() if items}

    def is_short(self, pool: Pool, cost: int) -> bool:
        """Whether another item of so many bytes would have to wait."""
        return pool in self._waiting or self._spent[pool] + cost > self._limit(pool)

    @property
    def pools(self) -> list[Pool]:
        """Those in which something waits for credit, rising."""
        return sorted(self._waiting)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _limit(self, pool: Pool) -> int:
        if pool in self._granted or not self._base:
            return self._granted.get(pool, 0)
        return self._base[min(pool, len(self._base) - 1)]


# ── on the wire ──────────────────────────────────────────────────────────────────────────────────────────────────


def pack(totals: Mapping[Pool, int]) -> list[list[int]]:
    """For a frame's header."""
    return [[pool, total] for pool, total in totals.items()]


def unpack(data: Any) -> dict[Pool, int]:
    """What `pack` wrote, from a peer. Raises ProtocolError."""
    if data is None:
        return {}
    if not isinstance(data, list) or len(data) > MAX_POOL:
        raise ProtocolError("credit that is no list")
    totals: dict[Pool, int] = {}
    for pair in data:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(map(_is_count, pair))
            or pair[0] >= MAX_POOL
        ):
            raise ProtocolError("credit that is no pairs of numbers")
        totals[pair[0]] = pair[1]
    return totals


def unpack_base(data: Any) -> tuple[int, ...]:
    """The base from a peer. Raises ProtocolError."""
    if not isinstance(data, list) or not 0 < len(data) <= 16 or not all(map(_is_count, data)):
        raise ProtocolError("credit without a base")
    return tuple(data)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_BYTES
