"""A reduce at the coordinator: one plan after the other, until everybody has voted alike on the latest.

Pure. What is summed, a step's exact cover or the states of clusters that average, is the caller's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.averaging.shares import Load, alike, divide
from hetpeer.bootstrap.decisions import CoordinatorConfig
from hetpeer.bootstrap.membership import Range
from hetpeer.bootstrap.patience import Pace

MAX_PLANS = 3
"""So many plans in a row may run out of time before those who do not vote are fenced, or end in differing votes."""

LARGEST_NORM = 1e300
"""Of a block, squared: no sum of float32 comes near it, and what all blocks have can be added."""
ALIKE = 1e-6
"""Norms of the same bits, as different processors add them."""

Sums = tuple[str, tuple[int, ...]]
"""A holder, and the ids whose sum it sends."""


class Reduce:
    """Plans and votes. `uplinks` is what leaves each holder, in bytes/s; 0: not known. `guarded`: spot checks look at what reducers receive."""

    def __init__(
        self,
        config: CoordinatorConfig,
        uplinks: Mapping[str, float],
        pace: Pace,
        now: float,
        *,
        guarded: bool = False,
    ) -> None:
        self.plan = 0
        """The latest plan."""
        self.under_way = False
        self.began_at = self._moved_at = now
        self.decision: Mapping[int, m.BlockVote] | None = None
        """The votes of all holders on each block's sum, once they agree."""
        self.trouble: str | None = None
        """Why there will be no decision."""
        self._config = config
        self._uplinks = alike(uplinks)
        self._pace = pace
        self._guarded = guarded
        self._votes: dict[str, dict[int, m.BlockVote]] = {}
        self._late = 0
        self._split = 0

    def make(
        self, sums: Mapping[int, Sequence[Sums]], roster: Mapping[str, Range], now: float
    ) -> dict[str, tuple[m.Cover, ...]]:
        """A new plan that adds `sums` (block → in this order) for the holders in `roster`. Returns what each is told."""
        self.plan += 1
        self.under_way = True
        self.decision = None
        self.began_at = self._moved_at = now
        self._votes.clear()
        sizes = {block: self._config.costs[block].elements for block in sums}
        covers = divided(sums, roster, sizes, self._config.ties, self._uplinks, guarded=self._guarded)
        return {
            peer: tuple(
                cover
                for cover in covers
                if peer in (*cover.receivers, *cover.observers) or peer in {p for p, _ in cover.slots}
            )
            for peer in sorted(roster)
        }

    def void(self) -> None:
        """The latest plan cannot be completed, or is not to be."""
        self.under_way = False
        self.decision = None
        self._votes.clear()

    def left(self) -> None:
        """Somebody has left: whoever is late may have waited for it."""
        self.decision = None
        self._late = 0
        self._votes.clear()

    def vote(self, peer: str, message: m.Vote, roster: Mapping[str, Range]) -> bool:
        """A holder's word on the sums of its blocks. True: all have voted, and differ, so that another plan is needed."""
        if not self.under_way or message.plan != self.plan:
            return False
        votes = {b.block: b for b in message.blocks}
        if votes.keys() != set(range(*roster[peer])):
            return False
        self._votes[peer] = votes
        if self._votes.keys() != roster.keys():
            return False
        agreed, split = self._outcome()
        broken = [b for b, vote in agreed.items() if not vote.finite or vote.squared_norm > LARGEST_NORM]
        if split:
            self._split += 1
            if self._split < MAX_PLANS:
                return True
            self.trouble = (
                f"holders of block {min(split)} differ in the bits of the sum after {MAX_PLANS} plans"
            )
        elif broken:
            self.trouble = f"the sum of block {broken[0]} is not finite"
        else:
            self.decision = agreed
        return False

    def _outcome(self) -> tuple[dict[int, m.BlockVote], set[int]]:
        """One vote per block, and the blocks whose votes differ."""
        agreed: dict[int, m.BlockVote] = {}
        split: set[int] = set()
        for votes in self._votes.values():
            for block, vote in votes.items():
                if not _alike(agreed.setdefault(block, vote), vote):
                    split.add(block)
        return agreed, split

    def accused(self, message: m.Objection, roster: Iterable[str]) -> dict[str, str]:
        """Who is to come back as another, with the reason: nobody for a plan that is not the latest."""
        if not self.under_way or message.plan != self.plan or message.peer not in roster:
            return {}
        return {message.peer: f"what it sent of block {message.block} cannot be added: {message.why}"}

    # ── patience ─────────────────────────────────────────────────────────────────────────────────────────────────

    def moves(self, message: m.Reducing, now: float) -> None:
        """Shards of the plan arrive: it is slow, not stuck."""
        if self.under_way and message.plan == self.plan:
            self._moved_at = now

    def overdue(self, now: float) -> bool:
        """Whether nothing has come of the plan for too long."""
        return (
            self.under_way
            and self.decision is None
            and now - self._moved_at >= self._pace.patience(self._config.reduce_s)
        )

    def ran_out(self) -> None:
        """It is made anew for that reason."""
        self._pace.ran_out()
        self._late += 1

    def mute(self, roster: Iterable[str], now: float) -> list[str]:
        """Who of `roster` did not vote in time on the last plan that they are given."""
        if self._late < MAX_PLANS - 1 or not self.overdue(now):
            return []
        return sorted(set(roster) - self._votes.keys())


def divided(
    sums: Mapping[int, Sequence[Sums]],
    roster: Mapping[str, Range],
    sizes: Mapping[int, int],
    ties: Mapping[int, Sequence[int]],
    uplinks: Mapping[str, float],
    *,
    guarded: bool = False,
) -> list[m.Cover]:
    """Who adds how much of each of `sums` (block → in this order), and who gets it. `sizes` are the blocks' elements, `ties` the blocks that share
    a parameter with one; `uplinks` and `guarded` as in `Reduce`.
    """
    holders = {b: sorted(p for p, (i, j) in roster.items() if i <= b < j) for b in sums}
    senders = {b: frozenset(peer for peer, _ in sums[b]) for b in sums}
    loads = {b: Load(sizes[b], senders[b], tuple(holders[b])) for b in sums}
    shares = divide(loads, uplinks, guarded=guarded)
    observers = {
        block: sorted({p for other in ties.get(block, ()) for p in holders[other]} - set(holders[block]))
        for block in sums
    }
    return [
        m.Cover(
            block=block,
            slots=tuple(sums[block]),
            reducers=shares[block],
            receivers=tuple(holders[block]),
            observers=tuple(observers[block]),
        )
        for block in sorted(sums)
    ]


def _alike(one: m.BlockVote, other: m.BlockVote) -> bool:
    """Whether two votes are on the same bits. One that lies about the norm alone would scale everybody's update."""
    same = (one.digest, one.finite) == (other.digest, other.finite)
    return same and math.isclose(one.squared_norm, other.squared_norm, rel_tol=ALIKE)
