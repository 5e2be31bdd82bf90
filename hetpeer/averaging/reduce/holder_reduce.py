"""A holder's part in one reduce plan: parts in, sums out, a vote at the end.

Pure. A plan names the exact cover of each block, slot by slot. A reducer keeps parts by (block, shard,
holder), so a repeated part changes nothing, and adds them in the plan's order: the result is exactly the
cover or does not exist (docs/protocol.md, steps 5 and 6). Per block it is a reduce-scatter followed by an
all-gather. A higher plan voids this one. Where a plan names our slot alone, and nobody else gets the sum, the
slot is the sum: it is inspected where it lies, and nothing is sent or copied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from hetpeer.averaging.effects import (
    Inspect,
    InspectSlot,
    Land,
    Look,
    SendPart,
    SendResult,
    Shard,
    SlotSum,
    SumParts,
    TiedPiece,
)
from hetpeer.averaging.messages import BlockVote, Cover, Length, Plan, Received
from hetpeer.averaging.reduce.reduce_shards import LENGTH, in_turns, shards_for_all, shards_of
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.stages.pipeline.effects import Handle, Release

NEWS = 4
"""Shard lengths that must arrive between two reports of progress to the coordinator."""

Effect = SendPart | SumParts | SendResult | Land | Inspect | InspectSlot | Release


def by_reducer(block: int, shards: Sequence[Shard], looks: Sequence[Look]) -> list[Received]:
    """Results of each reducer for `block`, as votes list them.

    `looks` are the inspections of `shards`, tied blocks included.
    """
    given: dict[tuple[int, str], list[Look]] = {}
    for shard, look in zip(shards, looks, strict=True):
        given.setdefault((shard.block, shard.reducer), []).append(look)
    return by_source(block, given)


def by_source(block: int, given: Mapping[tuple[int, str], Sequence[Look]]) -> list[Received]:
    """The received parts of `block`, as votes list them; `given`: block and sender → inspections in order."""
    return [
        Received(
            block=block,
            of=of,
            reducer=reducer,
            digest=blake2b("".join(look.digest for look in own).encode(), digest_size=16).hexdigest(),
            finite=all(look.finite for look in own),
        )
        for (of, reducer), own in given.items()
    ]


class Reduction:
    """Plan `plan` at holder `me`. `sizes`: block → elements of its vector; `ties`: shared parameters.

    `length`: elements of a shard. `by_all`: every receiver adds up all parts itself, in shards that are each
    of one of these tied parameters or of none.
    """

    def __init__(
        self,
        me: str,
        plan: Plan,
        sizes: Mapping[int, int],
        ties: Ties,
        length: int = LENGTH,
        *,
        by_all: Ties | None = None,
    ) -> None:
        self.number = plan.plan
        self._ties = ties
        self.covers = {cover.block: cover for cover in plan.covers}
        self._me = me
        self._by_all = by_all is not None
        self._shards = {
            c.block: shards_of(plan.plan, c, sizes[c.block], length)
            if by_all is None
            else shards_for_all(plan.plan, c, by_all.parts(c.block, sizes[c.block]))
            for c in plan.covers
        }
        self._looks: dict[int, dict[str, dict[int, Look]]] = {}
        """Block → sender → shard → inspection of its part; with `by_all`, of blocks looked at closely."""
        self._parts: dict[tuple[int, int], dict[str, Handle]] = {}
        self._results: dict[int, dict[int, Handle]] = {}
        self._summing: set[tuple[int, int]] = set()
        self._mine = {c.block for c in plan.covers if me in c.receivers}
        self._observed = {c.block for c in plan.covers if me in c.observers}
        self._inspecting: set[int] = set()
        self._closely = frozenset(plan.closely)
        self._marks = plan.marks
        self._in_slot: dict[int, int] = {}
        """Block → our slot, which is its sum as long as the slot does not change."""
        self._received: list[Received] = []
        self._lengths: dict[tuple[int, str], float] = {}
        self._news, self._untold = NEWS * length, 0
        self.votes: dict[int, BlockVote] = {}
        self._gradients: dict[int, Handle] = {}

    def start(self, slot: int | None, ids: Mapping[int, frozenset[int]]) -> list[Effect]:
        """Send the shards of our accepted slot, which holds `ids` per block, to their reducers.

        If the slot is the sum of a block, it is inspected instead. Nothing is done about a block at which the
        plan names other ids than we hold. The plan cannot complete then, and another one is made; a wrong sum
        would have been counted.
        """
        effects: list[Effect] = []
        for block, cover in self.covers.items():
            named = dict(cover.slots).get(self._me)
            if slot is None or named is None or ids.get(block) != frozenset(named):
                continue
            if slot >= 0 and self._is_ours_alone(cover):
                self._in_slot[block] = slot
                effects.append(InspectSlot(self.number, block, slot))
            else:
                effects += [SendPart(shard, slot) for shard in in_turns(self._shards[block])]
        return effects

    def _is_ours_alone(self, cover: Cover) -> bool:
        """Whether nobody else has a part of the block's sum, gets it, or may ask about it."""
        me, block = self._me, cover.block
        given = [holder for holder, _ in cover.slots] == [me] == list(cover.receivers)
        reduced = {reducer for reducer, _ in cover.reducers} == {me}
        shown = block in self._closely or any(one.block == block for one in self._marks)
        return given and reduced and not (cover.observers or self._ties.of(block) or shown)

    def slot_changed(self, block: int, slot: int) -> None:
        """Our `slot` is changed or dropped at `block`: it is not the block's sum any more, nor voted on."""
        if self._in_slot.get(block) == slot:
            del self._in_slot[block]
            self.votes.pop(block, None)

    def outgoing(self) -> Counter[str]:
        """Peer → elements that we send there under this plan, as parts and as sums."""
        elements: Counter[str] = Counter()
        for block, cover in self.covers.items():
            sends = any(holder == self._me for holder, _ in cover.slots)
            for shard in self._shards[block]:
                readers = self._readers(shard) if shard.reducer == self._me else ()
                for to in (*readers, *((shard.reducer,) if sends else ())):
                    elements[to] += shard.end - shard.begin
        del elements[self._me]
        return elements

    def part(self, block: int, index: int, holder: str, handle: Handle) -> list[Effect]:
        """`holder`'s slot of shard `index` of `block` has arrived; we are to be its reducer."""
        cover = self.covers.get(block)
        key = (block, index)
        if (
            cover is None
            or not index < len(self._shards[block])
            or self._shards[block][index].reducer != self._me
            or holder not in {h for h, _ in cover.slots}
            or key in self._summing
            or holder in self._parts.get(key, {})
        ):
            return [Release(handle)]
        parts = self._parts.setdefault(key, {})
        parts[holder] = handle
        shard = self._shards[block][index]
        self._untold += shard.end - shard.begin
        if len(parts) < len(cover.slots):
            return []
        self._summing.add(key)
        shared = any(peer != self._me for peer in self._readers(shard))
        holders = tuple(h for h, _ in cover.slots)
        marks = tuple(one for one in self._marks if one.block == block)
        closely = self._by_all and block in self._closely
        return [SumParts(shard, tuple(parts[h] for h in holders), shared, holders, marks, closely)]

    def summed(
        self, shard: Shard, handle: Handle, lengths: Sequence[float] = (), looks: Sequence[Look] = ()
    ) -> list[Effect]:
        """The sum of `shard` is made: send it to all holders of the block, and to holders of a tied block
        that need it.

        `lengths`: squared lengths of its parts. `looks`: inspections of them.
        """
        for (holder, _), look in zip(self.covers[shard.block].slots, looks, strict=False):
            self._looks.setdefault(shard.block, {}).setdefault(holder, {})[shard.index] = look
        for (holder, _), squared in zip(self.covers[shard.block].slots, lengths, strict=False):
            self._lengths[shard.block, holder] = self._lengths.get((shard.block, holder), 0.0) + squared
        parts = self._parts.pop((shard.block, shard.index), {})
        effects: list[Effect] = [Release(h) for h in parts.values()]
        return [*effects, *(SendResult(shard, to, handle) for to in self._readers(shard)), Release(handle)]

    def _readers(self, shard: Shard) -> tuple[str, ...]:
        """Peers that get `shard`'s sum: the block's receivers, and observers if it has tied elements; with
        `by_all` only its reducer.
        """
        if self._by_all:
            return (shard.reducer,)
        cover = self.covers[shard.block]
        return (*cover.receivers, *(cover.observers if self._is_tied(shard) else ()))

    def _is_tied(self, shard: Shard) -> bool:
        return self._ties.needed(shard.block, shard.begin, shard.end)

    def _expected(self, block: int) -> list[Shard]:
        """The shards of `block` that we get: all if we hold it, those with tied elements if we observe it;
        with `by_all` those that we add up.
        """
        shards = self._shards.get(block, [])
        if self._by_all:
            return [shard for shard in shards if shard.reducer == self._me]
        return shards if block in self._mine else [shard for shard in shards if self._is_tied(shard)]

    def result(self, block: int, index: int, sender: str, handle: Handle, length: int) -> list[Effect]:
        """The sum of shard `index` of `block` from its reducer; released if `length` is not the shard's."""
        cover = self.covers.get(block)
        known = self._results.setdefault(block, {})
        if (
            cover is None
            or block not in self._mine | self._observed
            or not index < len(self._shards[block])
            or self._shards[block][index].reducer != sender
            or self._shards[block][index].length != length
            or index in known
            or index not in {shard.index for shard in self._expected(block)}
        ):
            return [Release(handle)]
        known[index] = handle
        shard = self._shards[block][index]
        self._untold += shard.end - shard.begin
        expected = self._expected(block)
        closely = not (self._by_all or self._closely.isdisjoint((block, *self._ties.partners(block))))
        landed = Land(shard, handle, expected[0].begin, expected[-1].end, closely)
        if not self._arrived(block):
            return [landed]
        ready = [b for b in (block, *self._ties.partners(block)) if b in self._mine and self._is_ready(b)]
        self._inspecting |= set(ready)
        return [landed, *(self._inspect(b) for b in ready)]

    def has_news(self) -> bool:
        """Whether to report progress: NEWS shard lengths or more have arrived since this was last true."""
        told = self._untold >= self._news
        if told:
            self._untold = 0
        return told

    def _arrived(self, block: int) -> bool:
        """Whether all that we are to get of `block` is here."""
        return block in self._results and len(self._results[block]) == len(self._expected(block))

    def _is_ready(self, block: int) -> bool:
        """Whether a block of ours can be looked at: its own sums are here, and those of blocks tied to it."""
        return block not in self._inspecting and all(map(self._arrived, (block, *self._ties.partners(block))))

    def _inspect(self, block: int) -> Inspect:
        tied = {}
        for partner, shards in self._tied_to(block):
            handles = tuple(self._results[partner][shard.index] for shard in shards)
            tied[partner] = TiedPiece(shards[0].begin, handles)
        own = self._results[block]
        whole = tuple(own[index] for index in sorted(own))
        return Inspect(self.number, block, whole, tied, block in self._closely and not self._by_all)

    def _tied_to(self, block: int) -> list[tuple[int, list[Shard]]]:
        """Blocks tied to `block`, and the shards that we get of each."""
        return [
            (partner, [shard for shard in self._expected(partner) if self._is_tied(shard)])
            for partner in self._ties.partners(block)
        ]

    def inspected(self, vote: BlockVote, gradient: Handle | SlotSum, looks: Sequence[Look] = ()) -> None:
        """The whole gradient of a block was inspected, and each shard if asked for; see `complete`.

        A slot that has changed meanwhile counts for nothing.
        """
        if not isinstance(gradient, SlotSum):
            self._gradients[vote.block] = gradient
        elif self._in_slot.get(vote.block) != gradient.slot:
            return
        self.votes[vote.block] = vote
        if parts := self._looks.pop(vote.block, None):
            given = {
                (vote.block, sender): [of[i] for i in sorted(of)] for sender, of in sorted(parts.items())
            }
            self._received += by_source(vote.block, given)
        if looks:
            tied = [shard for _, shards in self._tied_to(vote.block) for shard in shards]
            self._received += by_reducer(vote.block, [*self._shards[vote.block], *tied], looks)

    def gradient(self, block: int) -> Handle | SlotSum:
        """The inspected sum of `block`."""
        return SlotSum(self._in_slot[block]) if block in self._in_slot else self._gradients[block]

    @property
    def received(self) -> tuple[Received, ...]:
        """Results of each reducer, for blocks that are inspected closely."""
        return tuple(self._received)

    @property
    def lengths(self) -> tuple[Length, ...]:
        """Squared lengths of the parts that we have added up."""
        return tuple(
            Length(block=block, peer=peer, squared=squared)
            for (block, peer), squared in self._lengths.items()
            if math.isfinite(squared)
        )

    def counted(self) -> frozenset[int]:
        """The blocks to which the plan adds what we have."""
        return frozenset(b for b, cover in self.covers.items() if self._me in dict(cover.slots))

    def sums(self, blocks: Iterable[int]) -> dict[int, tuple[tuple[Shard, Handle], ...]]:
        """Block → the sums that have come of it, shard by shard; only `blocks` that we hold.

        Nothing comes of a block whose sum is our slot.
        """
        return {
            block: tuple((shard, self._results[block][shard.index]) for shard in self._expected(block))
            for block in blocks
            if block in self._mine and block not in self._in_slot
        }

    def missing(self) -> tuple[set[str], set[str]]:
        """Reducers whose sums have not come, and holders whose parts have not come to us as a reducer."""
        sums = {
            shard.reducer
            for block in self._mine | self._observed
            for shard in self._expected(block)
            if shard.index not in self._results.get(block, {})
        }
        parts = {
            holder
            for block, cover in self.covers.items()
            for shard in self._shards[block]
            if shard.reducer == self._me and (block, shard.index) not in self._summing
            for holder, _ in cover.slots
            if holder not in self._parts.get((block, shard.index), {})
        }
        return sums - {self._me}, parts - {self._me}

    def abandon(self) -> list[Effect]:
        """Another plan replaces this one: release the shards that came for it."""
        parts = [handle for held in self._parts.values() for handle in held.values()]
        results = [handle for held in self._results.values() for handle in held.values()]
        gradients = list(self._gradients.values())
        self._parts, self._results, self._gradients = {}, {}, {}
        return [Release(handle) for handle in (*parts, *results, *gradients)]

    def release_observed(self) -> list[Effect]:
        """Release the sums of blocks that we do not hold: they are in ours, once all is inspected."""
        over = [handle for block in self._observed for handle in self._results.get(block, {}).values()]
        return [Release(handle) for handle in over]

    @property
    def complete(self) -> bool:
        """Whether every block that we hold has its gradient."""
        return set(self.votes) == self._mine

    def matches(self, digests: Mapping[int, str], blocks: Iterable[int]) -> bool:
        """Whether our reduced gradients of `blocks` have the `digests` of a commit."""
        return all(b in self.votes and self.votes[b].digest == digests.get(b) for b in blocks)
