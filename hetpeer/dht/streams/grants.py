"""Credit, the receiver's side: what each sender may put into our memory, what came, and what was given back. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.strikes import Offence, OffenceError
from hetpeer.dht.streams.flow_control import Pool

ANNOUNCE = 8
"""What came back is said at once when it is this part of what a pool may have under way; else with the next beat."""


@dataclass(frozen=True, slots=True)
class GrantBudget:
    """Bytes of one kind of pools: `least` for each pool, `most` for all of them together as long as that is more."""

    least: int = 0
    most: int = 0


@dataclass(slots=True)
class _Account:
    """One pool of one link."""

    granted: int = 0
    offered: int = 0
    returned: int = 0
    announced: int = 0

    @property
    def promised(self) -> int:
        """Bytes that are here, or may come."""
        return self.granted - self.returned


class Holding:
    """What one peer's tensors take here, by kind of pool, whatever link they came over."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()


class Grants:
    """The books of one sender's link. `budgets`: of each kind; pools from the last kind's number on are all of that kind,
    and there are `pools` in all.

    `holding` outlives the link: a sender that begins anew is granted less by what is still here from before.
    `announce` is called when the sender ought to hear soon.
    """

    def __init__(
        self,
        budgets: tuple[GrantBudget, ...],
        pools: int,
        holding: Holding,
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
        """Other budgets from now on. What was granted stays granted, and is left to run out."""
        self._budgets, self._pools = budgets, pools
        self._announce()

    def said(self) -> tuple[tuple[int, ...], dict[Pool, int]]:
        """What the sender is told: (base, pools), as `Queue.granted` takes it."""
        self._base = tuple(max(old, self._free_least(kind)) for kind, old in enumerate(self._base))
        for pool, account in self._accounts.items():
            self._top_up(pool)
            account.announced = account.granted
        return self._base, {pool: account.granted for pool, account in self._accounts.items()}

    def lane(self) -> GrantLane:
        """The books of one more lane of the link."""
        return GrantLane(self)

    def offered(self, pool: Pool, nbytes: int) -> None:
        """`nbytes` more of `pool` are coming, in whatever lane. Raises OffenceError where they were not granted."""
        account = self._account(pool)
        beyond = account.offered + nbytes - account.granted
        if beyond > 0:
            raise OffenceError(Offence.FLOOD, f"{beyond} bytes beyond its credit")
        account.offered += nbytes

    def came(self, pool: Pool, nbytes: int, kept: int) -> Callable[[], None]:
        """`nbytes` of `pool` have come or never will; `kept` of them are in memory until what is returned is called."""
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
        for other, theirs in self._accounts.items():  # what one pool gave back may be another's
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
        """Bytes that are still here from links before this one."""
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
    """What came in one lane. Frames of a lane come in order, so its totals say what was left out between two."""

    grants: Grants
    _offered: Counter[Pool] = field(default_factory=Counter)
    _settled: Counter[Pool] = field(default_factory=Counter)

    def offered(self, totals: Mapping[Pool, int]) -> None:
        """A frame or a beat begins whose sender has spent `totals` here, itself included.

        Raises ProtocolError for totals that fall, or are beyond the grants.
        """
        for pool, total in totals.items():
            if total < self._settled[pool]:
                raise ProtocolError("less credit spent than before")
            if total > self._offered[pool]:
                self.grants.offered(pool, total - self._offered[pool])
                self._offered[pool] = total

    def claim(self, pool: Pool, cost: int) -> None:
        """The frame that is coming takes `cost` bytes of `pool`. Raises OffenceError when they were not spent."""
        if self._offered[pool] - self._settled[pool] < cost:
            raise OffenceError(Offence.FLOOD, f"a frame of {cost} bytes that were not spent")

    def settle(self, pool: Pool = 0, kept: int = 0) -> Callable[[], None]:
        """All that was offered is here or will never be; `kept` bytes of `pool` are in memory until what is returned is
        called.
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
    """Nothing was kept."""
