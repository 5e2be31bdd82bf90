"""Flow control: how many bytes a sender may put into a receiver's memory, and what waits. Pure.

Every tensor belongs to a *pool*, a small number. A receiver grants each pool bytes, counted from the link's
beginning and never taken back. A sender states with each frame how many bytes it has spent in that pool and
lane. Both numbers only rise, so lost messages and broken streams do no harm. Bytes are granted again when the
receiver has freed the memory, not when they have arrived.

Pools are of a few kinds that share a budget. A pool waits only for its own tensors to be freed (docs/links.md
says which pools there must be so that nothing waits for itself). Every pool can always have `least` bytes,
the size of its largest frame, under way.

The sender has a `GrantQueue`; the receiver has `LinkGrants` for a link and a `GrantLane` for each lane.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.streams.abuse import Offence, OffenceError

Pool = int
MAX_POOL = 1 << 10
MAX_BYTES = 1 << 62
ANNOUNCE = 8
"""New grants are announced at once from this fraction (1/8) of a pool's room on; else with the next beat."""


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


def unpack(data: Any) -> dict[Pool, int]:
    """Pool → total, from the [[pool, total], …] of a peer's frame. Raises `ProtocolError`."""
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


@dataclass(frozen=True, slots=True)
class GrantBudget:
    """Bytes for one kind of pools: `least` for each pool, `most` for all of them together if that is more."""

    least: int = 0
    most: int = 0


@dataclass(slots=True)
class _Account:
    """Byte totals of one pool of one link, counted from the link's beginning."""

    granted: int = 0
    offered: int = 0
    returned: int = 0
    announced: int = 0

    @property
    def promised(self) -> int:
        """Bytes that are here or may still come."""
        return self.granted - self.returned


class HeldBytes:
    """Bytes of memory that one peer's tensors take, by kind of pool, over whatever link they came."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()


class LinkGrants:
    """Grants to one sender over one link.

    `budgets` has one entry for each kind; pools from the last kind's number on are all of that kind; there
    are `pools` in all. `holding` outlives the link: a sender that reconnects is granted less by what is still
    held from before. `announce` is called when the sender should hear of new grants soon.
    """

    def __init__(
        self,
        budgets: tuple[GrantBudget, ...],
        pools: int,
        holding: HeldBytes,
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        self._budgets = budgets
        self._pools = pools
        self._holding = holding
        self._announce = announce
        self._accounts: dict[Pool, _Account] = {}
        self._own: Counter[int] = Counter()
        self._base = tuple(self._free_least(kind) for kind in range(len(budgets)))

    def resize(self, budgets: tuple[GrantBudget, ...], pools: int) -> None:
        """Other budgets from now on. Bytes granted before stay granted and run out."""
        self._budgets, self._pools = budgets, pools
        self._announce()

    def said(self) -> tuple[tuple[int, ...], dict[Pool, int]]:
        """(base, pools) to tell the sender, as `Queue.granted` takes them."""
        self._base = tuple(max(old, self._free_least(kind)) for kind, old in enumerate(self._base))
        for pool, account in self._accounts.items():
            self._top_up(pool)
            account.announced = account.granted
        return self._base, {pool: account.granted for pool, account in self._accounts.items()}

    def lane(self) -> GrantLane:
        """Account of one more lane of the link."""
        return GrantLane(self)

    def offered(self, pool: Pool, nbytes: int) -> None:
        """Count `nbytes` more of `pool` as coming, in any lane. Raises OffenceError if not granted."""
        account = self._account(pool)
        beyond = account.offered + nbytes - account.granted
        if beyond > 0:
            raise OffenceError(Offence.FLOOD, f"{beyond} bytes beyond its grant")
        account.offered += nbytes

    def came(self, pool: Pool, nbytes: int, kept: int) -> Callable[[], None]:
        """`nbytes` of `pool` came or never will; `kept` of them stay in memory until the result is called."""
        kind = self._kind(pool)
        self._own[kind] += kept
        self._holding.held[kind] += kept
        self._back(pool, nbytes - kept)
        left = [kept]

        def back() -> None:
            freed, left[0] = left[0], 0
            self._own[kind] -= freed
            self._holding.held[kind] -= freed
            self._back(pool, freed)

        return back

    def _back(self, pool: Pool, nbytes: int) -> None:
        account = self._accounts[pool]
        account.returned += nbytes
        # what one pool freed may be granted to another of its kind
        for other, theirs in self._accounts.items():
            if self._kind(other) == self._kind(pool):
                room = self._top_up(other)
                if (theirs.granted - theirs.announced) * ANNOUNCE >= max(room, 1):
                    self._announce()

    def _top_up(self, pool: Pool) -> int:
        """Grant what may be granted. Returns how many bytes the pool may have under way in all."""
        account, kind = self._accounts[pool], self._kind(pool)
        budget = self._budgets[kind]
        elsewhere = self._elsewhere(kind)
        mates = sum(a.promised for p, a in self._accounts.items() if p != pool and self._kind(p) == kind)
        least = budget.least if elsewhere < max(budget.most, budget.least) else 0
        room = max(least, budget.most - elsewhere - mates)
        account.granted = max(account.granted, account.returned + room)
        return room

    def _elsewhere(self, kind: int) -> int:
        """Bytes still held from earlier links of this peer."""
        return self._holding.held[kind] - self._own[kind]

    def _free_least(self, kind: int) -> int:
        budget = self._budgets[kind]
        return budget.least if self._elsewhere(kind) < max(budget.most, budget.least) else 0

    def _account(self, pool: Pool) -> _Account:
        if pool not in self._accounts:
            if not 0 <= pool < self._pools:
                raise ProtocolError(f"no pool has the number {pool}")
            base = self._base[self._kind(pool)]
            self._accounts[pool] = _Account(granted=base, announced=base)
            self._top_up(pool)
        return self._accounts[pool]

    def _kind(self, pool: Pool) -> int:
        return min(pool, len(self._budgets) - 1)


@dataclass(slots=True)
class GrantLane:
    """Account of one lane, whose frames come in order: totals tell what was left out between two of them."""

    grants: LinkGrants
    _offered: Counter[Pool] = field(default_factory=Counter)
    _settled: Counter[Pool] = field(default_factory=Counter)

    def offered(self, totals: Mapping[Pool, int]) -> None:
        """A frame or beat begins whose sender has spent `totals` in this lane, this frame included.

        Raises ProtocolError for totals that fall or exceed the grants.
        """
        for pool, total in totals.items():
            if total < self._settled[pool]:
                raise ProtocolError("less of a grant spent than before")
            if total > self._offered[pool]:
                self.grants.offered(pool, total - self._offered[pool])
                self._offered[pool] = total

    def claim(self, pool: Pool, cost: int) -> None:
        """The coming frame takes `cost` bytes of `pool`. Raises OffenceError if not counted as spent."""
        if self._offered[pool] - self._settled[pool] < cost:
            raise OffenceError(Offence.FLOOD, f"a frame of {cost} bytes that were not spent")

    def settle(self, pool: Pool = 0, kept: int = 0) -> Callable[[], None]:
        """All offered is here or never will be; `kept` bytes of `pool` stay until the result is called."""
        back: Callable[[], None] = _nothing
        for one, total in self._offered.items():
            nbytes = total - self._settled[one]
            if nbytes:
                self._settled[one] = total
                given = self.grants.came(one, nbytes, kept if one == pool else 0)
                back = given if one == pool else back
        return back


def _nothing() -> None:
    """Nothing was kept, so nothing is freed."""
