"""A reduce at the coordinator: one plan after the other, until everybody has voted alike on the latest.

Pure. What is summed, a step's exact cover or the states of clusters that average, is the caller's business. Who spoils a plan, or holds it up, others know: from what they
say follows who adds up nothing for whom in the next one (reduce_complaints.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.averaging.reduce.holder_reduce import LENGTH, NEWS, length_of
from hetpeer.averaging.reduce.reducer_shares import Load, alike, divide
from hetpeer.bootstrap.conduct.disputed_pairs import DisputedPairs
from hetpeer.bootstrap.state.effects import CoordinatorConfig
from hetpeer.bootstrap.state.membership import Range
from hetpeer.bootstrap.state.timeouts import AdaptiveTimeouts
from hetpeer.bootstrap.trust.reduce_complaints import ReduceComplaints, reducers
from hetpeer.bootstrap.trust.vote_splits import same_bits
from hetpeer.dht.base.errors import ProtocolError

MAX_PLANS = 3
"""So many plans in a row may run out of time before those who do not vote are fenced."""

LARGEST_NORM = 1e300
"""Of a block, squared: no sum of float32 comes near it, and what all blocks have can be added."""

Sums = tuple[str, tuple[int, ...]]
"""A holder, and the ids whose sum it sends."""
Choice = Callable[[int, Sequence[str], Sequence[str]], tuple[str, ...]]
"""A block, who of its holders is fit to add it up, and all of them → who does."""


def anybody(_block: int, fit: Sequence[str], _holders: Sequence[str]) -> tuple[str, ...]:
    """All who may."""
    return tuple(fit)


class Reduce:
    """Plans and votes. `uplinks` is what leaves each holder, in bytes/s; 0: not known. `known`: who is in quarrel with whom. `guarded`: spot checks look at
    what reducers receive.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        uplinks: Mapping[str, float],
        known: DisputedPairs,
        timeouts: AdaptiveTimeouts,
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
        self.complaints = ReduceComplaints(known, config.ties)
        self.closely: tuple[int, ...] = ()
        """Blocks whose votes are to name what has come from each reducer."""
        self._config = config
        self._uplinks = alike(uplinks)
        self._known = known
        self._timeouts = timeouts
        self._guarded = guarded
        self._votes: dict[str, m.Vote] = {}
        self._shards: Counter[str] = Counter()
        """How much of the plan may still arrive at whom, in shards' lengths."""
        self._late = 0
        self._overran = -1
        """The last plan that has run out of time."""

    def make(
        self,
        sums: Mapping[int, Sequence[Sums]],
        roster: Mapping[str, Range],
        now: float,
        choose: Choice = anybody,
        *,
        says_length: bool = False,
    ) -> dict[str, tuple[m.Cover, ...]]:
        """A new plan that adds `sums` (block → in this order) for the holders in `roster`. Returns what each is told. `says_length`: all of them understand what a cover
        says of the length of its shards.
        """
        self.plan += 1
        self.under_way = True
        self.decision = None
        self.began_at = self._moved_at = now
        self._votes.clear()
        sizes = {block: self._config.costs[block].elements for block in sums}
        covers = divided(
            sums, roster, sizes, self._config.ties, self._uplinks, self._known, choose, guarded=self._guarded
        )
        if says_length:
            covers = [cover.model_copy(update={"length": length_of(cover)}) for cover in covers]
        self._shards = _shards(covers, sizes)
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
        """The latest plan cannot be completed, or is not to be."""
        self.under_way = False
        self.decision = None
        self._votes.clear()

    def left(self) -> None:
        """Somebody has left: whoever is late may have waited for it."""
        self.decision = None
        self._late = 0
        self._votes.clear()

    def vote(self, peer: str, message: m.Vote, roster: Mapping[str, Range], now: float) -> bool:
        """A holder's word on the sums of its blocks, at `now`. True: all have voted, and another plan is needed. Raises `ProtocolError` for a norm that no sum has."""
        if not self.under_way or message.plan != self.plan:
            return False
        if any(vote.finite and vote.squared_norm > LARGEST_NORM for vote in message.blocks):
            raise ProtocolError("a vote with a norm that no sum has", peer=peer)
        named = [vote.block for vote in message.blocks]
        if len(set(named)) < len(named):
            raise ProtocolError("a vote on a block twice", peer=peer)
        if set(named) != set(range(*roster[peer])):
            return False
        self._votes[peer] = message
        if self._votes.keys() != roster.keys():
            return False
        agreed, split = self._outcome()
        broken = {block for block, vote in agreed.items() if not vote.finite} - split
        if not split and not broken:
            self.decision = agreed
            self._waited(now)
            return False
        if not split | broken <= set(self.closely):
            self.complaints.look_closely(split | broken)
            return True
        if split:
            return self.complaints.torn(self._votes, sorted(split))
        again = self.complaints.spoilt(self._votes, min(broken))
        if self.complaints.overflows(min(broken)):
            self.trouble = f"the sum of block {min(broken)} is not finite, whoever adds it up"
        return again and self.trouble is None

    def _outcome(self) -> tuple[dict[int, m.BlockVote], set[int]]:
        """One vote per block, and the blocks whose votes differ."""
        agreed: dict[int, m.BlockVote] = {}
        split: set[int] = set()
        for message in self._votes.values():
            for vote in message.blocks:
                if not same_bits(agreed.setdefault(vote.block, vote), vote):
                    split.add(vote.block)
        return agreed, split

    @property
    def votes(self) -> Mapping[str, m.Vote]:
        """On the latest plan, by who has voted."""
        return self._votes

    def objected(self, peer: str, message: m.Objection) -> bool:
        """`peer` cannot add what another has sent. True: another plan is needed."""
        return self.under_way and self.complaints.objected(peer, message, self.plan)

    # ── patience ────────────────────────────────────────────────────────────────────────────────────────────

    def moves(self, peer: str, message: m.Reducing, now: float) -> None:
        """Shards of the plan arrive at `peer`: it is slow, not stuck. It cannot say so oftener than there are shards."""
        if self.under_way and message.plan == self.plan and self._shards[peer] > 0:
            self._shards[peer] -= NEWS
            if self.decision is None:
                self._waited(now)
            self._moved_at = now

    def _waited(self, now: float) -> None:
        self._timeouts.waited((now - self._moved_at) / self._config.reduce_s)

    def overdue(self, now: float) -> bool:
        """Whether nothing has come of the plan for too long."""
        return (
            self.under_way
            and self.decision is None
            and now - self._moved_at >= self._timeouts.scaled(self._config.reduce_s)
        )

    def ran_out(self) -> bool:
        """It is to be made anew for that reason, by others, if what was said of the one before helps. False: once those have gone who are turned out."""
        self._timeouts.ran_out()
        helps = self.complaints.late()
        if helps or self.complaints.pending:
            self._timeouts.blamed()
            self._late = min(self._late, MAX_PLANS - 3)
        self._late += 1
        self._overran = self.plan
        return not self.complaints.pending

    def missed(self, peer: str, message: m.Missed) -> None:
        """What had not come to `peer` of a plan that was given up."""
        if message.plan == self._overran:
            self.complaints.missed(peer, message)

    def mute(self, roster: Iterable[str], now: float) -> list[str]:
        """Who of `roster` did not vote in time on the last plan that they are given."""
        if self._late < MAX_PLANS - 1 or not self.overdue(now):
            return []
        mute = sorted(set(roster) - self._votes.keys())
        if self._votes:
            self._timeouts.blamed()
        return mute


def divided(
    sums: Mapping[int, Sequence[Sums]],
    roster: Mapping[str, Range],
    sizes: Mapping[int, int],
    ties: Mapping[int, Sequence[int]],
    uplinks: Mapping[str, float],
    known: DisputedPairs,
    choose: Choice = anybody,
    *,
    guarded: bool = False,
) -> list[m.Cover]:
    """Who adds how much of each of `sums` (block → in this order), and who gets it. `sizes` are the blocks' elements, `ties` the blocks that share
    a parameter with one; `uplinks`, `known` and `guarded` as in `Reduce`. Where everybody is in quarrel with somebody, all add up.
    """
    holders = {b: sorted(p for p, (i, j) in roster.items() if i <= b < j) for b in sums}
    senders = {b: frozenset(peer for peer, _ in sums[b]) for b in sums}
    observers = {
        block: sorted({p for other in ties.get(block, ()) for p in holders[other]} - set(holders[block]))
        for block in sums
    }
    fit = {
        b: choose(b, reducers(known, tuple(holders[b]), {*senders[b], *observers[b]}), holders[b])
        for b in sums
    }
    loads = {b: Load(sizes[b], senders[b], tuple(holders[b]), fit[b]) for b in sums}
    shares = divide(loads, uplinks, guarded=guarded)
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


def _shards(covers: Iterable[m.Cover], sizes: Mapping[int, int]) -> Counter[str]:
    """Who gets how many elements in a plan, as parts and as sums, in shards' lengths; a little more where there is little."""
    found: Counter[str] = Counter()
    for cover in covers:
        length, total = -(-sizes[cover.block] // LENGTH), sum(share for _, share in cover.reducers)
        for reducer, share in cover.reducers:
            found[reducer] += 1 + len(cover.slots) * length * share // total
        for reader in (*cover.receivers, *cover.observers):
            found[reader] += length
    return found
