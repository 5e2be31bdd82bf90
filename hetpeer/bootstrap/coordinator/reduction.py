"""A reduce at the coordinator: one plan after another, until all holders have voted alike on the latest.

Pure. The caller decides what is added: a step's exact cover, or the states of clusters that average. Reports
on peers that spoil or delay a plan exclude reducers from the next one (reduce_complaints.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import Range
from hetpeer.averaging.reduce.holder_reduce import NEWS
from hetpeer.averaging.reduce.reduce_shards import LENGTH, ReducerLoad, alike, divide, length_of
from hetpeer.bootstrap.conduct.disputed_pairs import DisputedPairs
from hetpeer.bootstrap.state.effects import CoordinatorConfig
from hetpeer.bootstrap.state.timeouts import AdaptiveTimeouts
from hetpeer.bootstrap.trust.reduce_complaints import ReduceComplaints, reducers, same_bits
from hetpeer.dht.base.errors import ProtocolError

MAX_PLANS = 3
"""Plans in a row that may time out before holders that do not vote are fenced."""

LARGEST_NORM = 1e300
"""Largest squared norm of a block in a vote: above any float32 vector's; those of all blocks can be added."""

Contribution = tuple[str, tuple[int, ...]]
"""A holder, and the ids whose slots it sends added up."""
Choice = Callable[[int, Sequence[str], Sequence[str]], tuple[str, ...]]
"""Block, its fit holders, all its holders → those that reduce it."""


def anybody(_block: int, fit: Sequence[str], _holders: Sequence[str]) -> tuple[str, ...]:
    """The choice of all fit holders."""
    return tuple(fit)


@dataclass(slots=True)
class Reduce:
    """Plans and votes of one reduce."""

    config: CoordinatorConfig
    uplinks: Mapping[str, float]
    """Holder → bytes/s that it can send; 0: unknown."""
    complaints: ReduceComplaints
    timeouts: AdaptiveTimeouts
    guarded: bool = False
    """Whether spot checks look at what reducers receive."""
    by_all: bool = False
    """Whether every receiver adds up all parts itself."""
    plan: int = 0
    """Number of the latest plan."""
    under_way: bool = False
    """Whether there is a plan, decided or not."""
    began_at: float = 0.0
    """Time at which the latest plan was made."""
    decision: Mapping[int, m.BlockVote] | None = None
    """The votes of all holders on each block's sum, once they agree."""
    trouble: str | None = None
    """Reason why there will be no decision; None as long as there may be one."""
    closely: tuple[int, ...] = ()
    """Blocks whose votes must name what came from each reducer."""
    votes: dict[str, m.Vote] = field(default_factory=dict)
    """Holder → its vote on the latest plan."""
    _moved_at: float = 0.0
    _shards: Counter[str] = field(default_factory=Counter)
    """Holder → progress reports of the plan that it may still send, in shards' lengths."""
    _late: int = 0
    _overran: int = -1
    """Last plan that timed out."""

    def make(
        self,
        contributions: Mapping[int, Sequence[Contribution]],
        roster: Mapping[str, Range],
        now: float,
        choose: Choice = anybody,
        runs: Mapping[int, Sequence[Sequence[int]]] | None = None,
    ) -> dict[str, tuple[m.Cover, ...]]:
        """A new plan that adds `contributions` (block → holders and ids, in order) for `roster`'s holders.

        Returns peer → its covers. `runs`: block → `Cover.runs`, if the ids come in the order of adding.
        """
        self.plan += 1
        self.under_way = True
        self.decision = None
        self.began_at = self._moved_at = now
        self.votes.clear()
        sizes = {block: self.config.costs[block].elements for block in contributions}
        covers = divided(
            contributions,
            roster,
            sizes,
            self.config.ties,
            alike(self.uplinks),
            self.complaints.known,
            choose,
            guarded=self.guarded,
        )
        covers = [
            cover.model_copy(
                update={
                    "reducers": tuple((peer, 1) for peer in cover.receivers)
                    if self.by_all
                    else cover.reducers,
                    "length": length_of(cover),
                    "runs": () if runs is None else tuple(map(tuple, runs[cover.block])),
                }
            )
            for cover in covers
        ]
        self._shards = _shards(covers, sizes, by_all=self.by_all)
        self.closely = self.complaints.begin(covers, dict(roster))
        return {
            peer: tuple(
                cover
                for cover in covers
                if peer in (*cover.receivers, *cover.observers) or peer in {p for p, _ in cover.slots}
            )
            for peer in sorted(roster)
        }

    def void(self) -> None:
        """Drop the latest plan: it cannot or must not be completed."""
        self.under_way = False
        self.decision = None
        self.votes.clear()

    def left(self) -> None:
        """A volunteer has left: holders that are late may have waited for it, so all vote again."""
        self.decision = None
        self._late = 0
        self.votes.clear()

    def vote(self, peer: str, message: m.Vote, roster: Mapping[str, Range], now: float) -> bool:
        """Note a holder's vote. True: all have voted, and another plan is needed. Raises `ProtocolError`."""
        if not self.under_way or message.plan != self.plan:
            return False
        if any(vote.finite and max(_squares(vote)) > LARGEST_NORM for vote in message.blocks):
            raise ProtocolError("a vote with a norm that no sum has", peer=peer)
        named = [vote.block for vote in message.blocks]
        if len(set(named)) < len(named):
            raise ProtocolError("a vote on a block twice", peer=peer)
        if set(named) != set(range(*roster[peer])):
            return False
        self.votes[peer] = message
        if self.votes.keys() != roster.keys():
            return False
        agreed, split = self._outcome()
        broken = {block for block, vote in agreed.items() if not vote.finite} - split
        if not split and not broken:
            self.decision = agreed
            self._waited(now)
            return False
        if not split | broken <= set(self.closely):
            self.complaints.known.look_closely(split | broken)
            return True
        if split:
            return self.complaints.torn(self.votes, sorted(split))
        again = self.complaints.spoilt(self.votes, min(broken))
        if self.complaints.overflows(min(broken)):
            self.trouble = f"the sum of block {min(broken)} is not finite, whoever adds it up"
        return again and self.trouble is None

    def _outcome(self) -> tuple[dict[int, m.BlockVote], set[int]]:
        """One vote per block, and the blocks whose votes differ."""
        agreed: dict[int, m.BlockVote] = {}
        split: set[int] = set()
        for message in self.votes.values():
            for vote in message.blocks:
                if not same_bits(agreed.setdefault(vote.block, vote), vote):
                    split.add(vote.block)
        return agreed, split

    def objected(self, peer: str, message: m.Objection) -> bool:
        """`peer` cannot add what another has sent. True: another plan is needed."""
        return self.under_way and self.complaints.objected(peer, message, self.plan)

    # ── timeouts ────────────────────────────────────────────────────────────────────────────────────────────

    def moves(self, peer: str, message: m.Reducing, now: float) -> None:
        """Shards arrive at `peer`: it is slow, not stuck. It can say so once for each shard at most."""
        if self.under_way and message.plan == self.plan and self._shards[peer] > 0:
            self._shards[peer] -= NEWS
            if self.decision is None:
                self._waited(now)
            self._moved_at = now

    def _waited(self, now: float) -> None:
        self.timeouts.waited((now - self._moved_at) / self.config.reduce_s)

    def overdue(self, now: float) -> bool:
        """Whether nothing has come of the plan within the timeout."""
        return (
            self.under_way
            and self.decision is None
            and now - self._moved_at >= self.timeouts.scaled(self.config.reduce_s)
        )

    def ran_out(self) -> bool:
        """The plan timed out: returns whether to make another now; False: fenced volunteers leave first."""
        self.timeouts.ran_out()
        helps = self.complaints.late()
        if helps or self.complaints.pending:
            self.timeouts.blamed()
            self._late = min(self._late, MAX_PLANS - 3)
        self._late += 1
        self._overran = self.plan
        return not self.complaints.pending

    def missed(self, peer: str, message: m.Missed) -> None:
        """Note what had not come to `peer` of a plan that timed out."""
        if message.plan == self._overran:
            self.complaints.missed(peer, message)

    def mute(self, roster: Iterable[str], now: float) -> list[str]:
        """Holders of `roster` that did not vote in time on the last plan that they get."""
        if self._late < MAX_PLANS - 1 or not self.overdue(now):
            return []
        mute = sorted(set(roster) - self.votes.keys())
        if self.votes:
            self.timeouts.blamed()
        return mute


def divided(
    contributions: Mapping[int, Sequence[Contribution]],
    roster: Mapping[str, Range],
    sizes: Mapping[int, int],
    ties: Mapping[int, Sequence[int]],
    uplinks: Mapping[str, float],
    known: DisputedPairs,
    choose: Choice = anybody,
    *,
    guarded: bool = False,
) -> list[m.Cover]:
    """Covers: who reduces how much of `contributions` (block → holders and ids, in order), and who gets it.

    `sizes`: block → elements. `ties`: block → blocks that share a parameter with it. `uplinks` and `guarded`
    as in `Reduce`, `known`: disputed pairs. Where every holder is in dispute with another, all reduce.
    """
    holders = {b: sorted(p for p, (i, j) in roster.items() if i <= b < j) for b in contributions}
    senders = {b: frozenset(peer for peer, _ in contributions[b]) for b in contributions}
    observers = {
        block: sorted({p for other in ties.get(block, ()) for p in holders[other]} - set(holders[block]))
        for block in contributions
    }
    fit = {
        b: choose(b, reducers(known, tuple(holders[b]), {*senders[b], *observers[b]}), holders[b])
        for b in contributions
    }
    loads = {b: ReducerLoad(sizes[b], senders[b], tuple(holders[b]), fit[b]) for b in contributions}
    shares = divide(loads, uplinks, guarded=guarded)
    return [
        m.Cover(
            block=block,
            slots=tuple(contributions[block]),
            reducers=shares[block],
            receivers=tuple(holders[block]),
            observers=tuple(observers[block]),
        )
        for block in sorted(contributions)
    ]


def _shards(covers: Iterable[m.Cover], sizes: Mapping[int, int], *, by_all: bool) -> Counter[str]:
    """Peer → elements that it receives in a plan, as parts and as results, in shards' lengths; rounded up."""
    found: Counter[str] = Counter()
    for cover in covers:
        length = -(-sizes[cover.block] // LENGTH)
        total = 1 if by_all else sum(share for _, share in cover.reducers)
        for reducer, share in cover.reducers:
            found[reducer] += 1 + len(cover.slots) * length * share // total
        for reader in (*cover.receivers, *cover.observers):
            found[reader] += length
    return found


def _squares(vote: m.BlockVote) -> tuple[float, ...]:
    """All squared norms of a vote."""
    return vote.squared_norm, *vote.group_squares
