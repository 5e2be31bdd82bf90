"""A holder's part in one reduce plan: parts in, sums out, a vote at the end.

Pure. A plan names for each block the exact cover, slot by slot. Reducers take parts by (block, shard, holder), a *set*,
so repeated parts are no-ops, and sum them in the plan's order: the result is exactly the cover or does not exist
(docs/protocol.md, steps 5 and 6). A reduce-scatter followed by an all-gather, per block; a higher plan voids this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hetpeer.averaging.effects import Inspect, SendPart, SendResult, Shard, SumParts
from hetpeer.averaging.messages import BlockVote, Cover, Plan
from hetpeer.stages.execution.effects import Handle, Release

Effect = SendPart | SumParts | SendResult | Inspect | Release


def shards_of(plan: int, cover: Cover, elements: int) -> list[Shard]:
    """`cover.block`'s flat gradient of `elements` floats in one nearly equal shard per reducer."""
    count = len(cover.reducers)
    borders = [elements * i // count for i in range(count + 1)]
    return [
        Shard(plan, cover.block, i, borders[i], borders[i + 1], reducer)
        for i, reducer in enumerate(cover.reducers)
    ]


class Reduction:
    """Plan `plan` at holder `me`; `sizes` gives each block's gradient length in elements."""

    def __init__(self, me: str, plan: Plan, sizes: Mapping[int, int]) -> None:
        self.number = plan.plan
        self.covers = {cover.block: cover for cover in plan.covers}
        self._me = me
        self._shards = {c.block: shards_of(plan.plan, c, sizes[c.block]) for c in plan.covers}
        self._parts: dict[tuple[int, int], dict[str, Handle]] = {}
        self._results: dict[int, dict[int, Handle]] = {}
        self._summing: set[tuple[int, int]] = set()
        self._mine = {c.block for c in plan.covers if me in c.receivers}
        self.votes: dict[int, BlockVote] = {}
        self.gradients: dict[int, Handle] = {}

    def start(self, slot: int | None, ids: Mapping[int, frozenset[int]]) -> list[Effect]:
        """Send the shards of our accepted slot, which holds `ids` per block, to their reducers.

        A block at which the plan names other ids than we hold is not sent: the plan then cannot complete and another
        one is made, while a wrong sum would have been counted.
        """
        return [
            SendPart(shard, slot)
            for block, cover in self.covers.items()
            for holder, named in cover.slots
            if holder == self._me and slot is not None and ids.get(block) == frozenset(named)
            for shard in self._shards[block]
        ]

    def part(self, block: int, index: int, holder: str, handle: Handle) -> list[Effect]:
        """`holder`'s slot of shard `index` of `block` has arrived; we are to be its reducer."""
        cover = self.covers.get(block)
        key = (block, index)
        if (
            cover is None
            or not index < len(cover.reducers)
            or cover.reducers[index] != self._me
            or holder not in {h for h, _ in cover.slots}
            or key in self._summing
            or holder in self._parts.get(key, {})
        ):
            return [Release(handle)]
        parts = self._parts.setdefault(key, {})
        parts[holder] = handle
        if len(parts) < len(cover.slots):
            return []
        self._summing.add(key)
        return [SumParts(self._shards[block][index], tuple(parts[h] for h, _ in cover.slots))]

    def summed(self, shard: Shard, handle: Handle) -> list[Effect]:
        """The sum of `shard` is made: everybody who holds the block gets it."""
        parts = self._parts.pop((shard.block, shard.index), {})
        effects: list[Effect] = [Release(h) for h in parts.values()]
        return effects + [SendResult(shard, to, handle) for to in self.covers[shard.block].receivers]

    def result(self, block: int, index: int, sender: str, handle: Handle) -> list[Effect]:
        """The sum of shard `index` of `block` has arrived from its reducer."""
        cover = self.covers.get(block)
        known = self._results.setdefault(block, {})
        if (
            cover is None
            or block not in self._mine
            or not index < len(cover.reducers)
            or cover.reducers[index] != sender
            or index in known
        ):
            return [Release(handle)]
        known[index] = handle
        if len(known) < len(cover.reducers):
            return []
        return [Inspect(self.number, block, tuple(known[i] for i in range(len(cover.reducers))))]

    def inspected(self, vote: BlockVote, gradient: Handle) -> None:
        """The whole gradient of a block was looked at; `complete` tells when all of ours were."""
        self.votes[vote.block] = vote
        self.gradients[vote.block] = gradient

    @property
    def complete(self) -> bool:
        """Whether every block that we hold has its gradient."""
        return set(self.votes) == self._mine

    def matches(self, digests: Mapping[int, str], blocks: Iterable[int]) -> bool:
        """Whether what we hold of `blocks` is what `digests` (a commit) names."""
        return all(b in self.votes and self.votes[b].digest == digests.get(b) for b in blocks)
