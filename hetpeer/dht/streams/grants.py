"""Flow control, the receiver's side: grants to each sender, what arrived and what was freed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.strikes import Offence, OffenceError
from hetpeer.dht.streams.flow_control import Pool

ANNOUNCE = 8
"""New grants are announced at once from this fraction (1/8) of a pool's room on; else with the next beat."""


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
        """Count `nbytes` more of `pool` as coming, in any lane. Raises OffenceError if they were
        not granted.
        """
        account = self._account(pool)
        beyond = account.offered + nbytes - account.granted
        if beyond > 0:
            raise OffenceError(Offence.FLOOD, f"{beyond} bytes beyond its grant")
        account.offered += nbytes

    def came(self, pool: Pool, nbytes: int, kept: int) -> Callable[[], None]:
        """`nbytes` of `pool` have come or never will; `kept` of them stay in memory until the returned
        function is called.
        """
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
    """Account of one lane. Its frames come in order, so the totals tell what was left out between two of
    them.
    """

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
        """The coming frame takes `cost` bytes of `pool`. Raises OffenceError if the sender did not count them
        as spent.
        """
        if self._offered[pool] - self._settled[pool] < cost:
            raise OffenceError(Offence.FLOOD, f"a frame of {cost} bytes that were not spent")

    def settle(self, pool: Pool = 0, kept: int = 0) -> Callable[[], None]:
        """All that was offered is here or never will be.

        `kept` bytes of `pool` stay in memory until the returned function is called.
        """
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
