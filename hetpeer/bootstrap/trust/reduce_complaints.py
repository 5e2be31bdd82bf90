"""Complaints of the members of a reduce about each other, and their consequences (docs/trust.md). Pure.

Votes that differ, a sum that is not finite, a part that cannot be added, a plan that times out: one peer is
the cause, by another peer's statement. So the next plan lets neither reduce for the other. A peer in dispute
with most others is fenced, and one of two peers if nobody else is left to reduce.

A detailed vote lists what came from each reducer; a vote of an older version does not. If two votes list
different things, either the reducer sent different things or one of the voters makes a false statement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.conduct.disputed_pairs import DisputedPairs, Pair

ALIKE = 1e-6
"""Relative difference of norms of the same bits, as different processors add them."""

Source = tuple[int, str]
"""A block and its reducer."""


def same_bits(one: m.BlockVote, other: m.BlockVote) -> bool:
    """Whether two votes are on the same bits; a false norm alone would scale everybody's update."""
    same = (one.digest, one.finite) == (other.digest, other.finite)
    return same and math.isclose(one.squared_norm, other.squared_norm, rel_tol=ALIKE)


def disputes(votes: Mapping[str, m.Vote], block: int) -> set[Pair]:
    """Contradicting pairs after differing votes on `block`."""
    words = {peer: _received(vote, block) for peer, vote in votes.items()}
    found: set[Pair] = set()
    for source in {source for word in words.values() for source in word}:
        found |= _apart(source[1], {peer: word[source] for peer, word in words.items() if source in word})
    return found or _among(
        {peer: one for peer, vote in votes.items() for one in vote.blocks if one.block == block}
    )


def spoilers(votes: Mapping[str, m.Vote], block: int, reducers: Collection[str]) -> set[str]:
    """Reducers of `block` and of tied blocks whose sum is not finite, by the majority of its holders."""
    words = [word for vote in votes.values() if (word := _received(vote, block))]
    against = Counter(reducer for word in words for (_, reducer), (_, finite) in word.items() if not finite)
    return {reducer for reducer in reducers if 2 * against[reducer] > len(words)}


def _received(vote: m.Vote, block: int) -> dict[Source, tuple[str, bool]]:
    return {(one.of, one.reducer): (one.digest, one.finite) for one in vote.received if one.block == block}


def _apart(reducer: str, words: Mapping[str, Hashable]) -> set[Pair]:
    """Contradicting pairs by `words`: holder → what it received from `reducer`.

    The reducer's own statement decides if it holds the block; otherwise the majority does, if there is one.
    """
    usual = words.get(reducer)
    if usual is None:
        (usual, most), *others = Counter(words.values()).most_common(2)
        usual = None if others and others[0][1] == most else usual
    return {frozenset((reducer, peer)) for peer, word in words.items() if word != usual and peer != reducer}


def _among(votes: Mapping[str, m.BlockVote]) -> set[Pair]:
    """Contradicting pairs among voters that received the same from everybody but computed different sums."""
    return {
        frozenset((one, other))
        for (one, mine), (other, theirs) in combinations(sorted(votes.items()), 2)
        if not same_bits(mine, theirs)
    }


DIFFERS = "what it says of sums is not what others say"
SPOILS = "what it adds up is no number"
REFUSED = "parts that it has sent or refused could not be added"
FALSE = "what it has sent or added up is not what it says, or what others say"
CONTRADICTS = "what it says of the shares of a block is not what it has said of the whole"
HUGE = "what it counts is so much more than what others do that nothing would be left of theirs in a sum"
MOST_NAMED = 16
"""Largest number of pairs in a log record."""
LATE = "others wait for it in vain, or it for them"


@dataclass(slots=True)
class ReduceComplaints:
    """Complaints in one reduce."""

    known: DisputedPairs
    """All disputed pairs so far."""
    ties: Mapping[int, Collection[int]]
    """Block → blocks that share a parameter with it."""
    _covers: Mapping[int, m.Cover] = field(default_factory=dict)
    _roster: Mapping[str, Range] = field(default_factory=dict)
    _out: dict[str, str] = field(default_factory=dict)
    _news: list[dict[str, Any]] = field(default_factory=list)
    _missed: dict[str, m.Missed] = field(default_factory=dict)
    """Parts missing when the last plan timed out, by its members' statements."""

    def begin(self, covers: Iterable[m.Cover], roster: Mapping[str, Range]) -> tuple[int, ...]:
        """Start a new plan. Returns the blocks whose votes must list what each reducer sent."""
        self._covers = {cover.block: cover for cover in covers}
        self._roster = roster
        return self.known.closely(self._covers)

    def news(self) -> list[dict[str, Any]]:
        """Log records on new disputes since the last call."""
        news, self._news = self._news, []
        return news

    @property
    def pending(self) -> bool:
        """Whether a peer is to be fenced."""
        return bool(self._out)

    def to_fence(self) -> dict[str, str]:
        """Peers to fence → reason, since the last call."""
        out, self._out = self._out, {}
        return out

    # ── votes ───────────────────────────────────────────────────────────────────────────────────────────────

    def torn(self, votes: Mapping[str, m.Vote], blocks: Iterable[int]) -> bool:
        """Handle differing votes on `blocks`. Returns whether another plan helps; else a peer is fenced."""
        found = {block: disputes(votes, block) for block in blocks}
        what = f"they say different things of a sum of block {min(found)}"
        return self._follow({pair for pairs in found.values() for pair in pairs}, found, DIFFERS, what)

    def spoilt(self, votes: Mapping[str, m.Vote], block: int) -> bool:
        """Handle a sum of `block` that is the same for all and not finite.

        Returns whether another plan helps; otherwise its reducers are fenced.
        """
        concerned = [
            cover for cover in self._covers.values() if cover.block in (block, *self.ties.get(block, ()))
        ]
        found = spoilers(votes, block, {peer for cover in concerned for peer, _ in cover.reducers})
        for peer in found:
            self.known.spoils(peer)
        if found and self._has_reducers(block):
            return True
        self._go(found or {self.known.blamed(self._covers[block].receivers)}, SPOILS, shunned=found)
        return False

    def overflows(self, block: int) -> bool:
        """Whether all of several holders had sums of `block` that are not finite: the model is the cause."""
        return self.known.have_all_spoilt(self._covers[block].receivers)

    def proven(self, pairs: Mapping[int, set[Pair]]) -> None:
        """Handle contradictions that a sum proof found: block → disputed pairs."""
        everybody = {pair for theirs in pairs.values() for pair in theirs}
        self._note(
            self.known.add(everybody),
            f"a sum of block {min(pairs)} is not what was sent, or one of them says so falsely",
        )
        out = shunned = self._shunned(everybody)
        for block, theirs in pairs.items():
            if not out and not self._has_reducers(block):
                out = {self.known.blamed({peer for pair in theirs for peer in pair})}
        self._go(out, FALSE, shunned=shunned)

    def drowns(self, peers: Collection[str]) -> None:
        """Handle parts so huge that others vanish in the sum; the model or a sample may be the cause."""
        self._go(peers, HUGE)

    def contradict(self, peers: Collection[str]) -> None:
        """Handle peers that contradict themselves on a block and its shares: no other statement is needed."""
        self._go(peers, CONTRADICTS, shunned=peers)

    # ── parts ───────────────────────────────────────────────────────────────────────────────────────────────

    def objected(self, peer: str, message: m.Objection, plan: int) -> bool:
        """Handle a reducer's objection to a part under `plan`. Returns whether a new plan helps."""
        cover = self._covers.get(message.block)
        if cover is None or message.plan != plan or message.peer == peer:
            return False
        if peer not in dict(cover.reducers) or message.peer not in dict(cover.slots):
            return False
        pair = frozenset((peer, message.peer))
        what = f"what {message.peer} sent of block {message.block} cannot be added: {message.why}"
        return self._follow({pair}, {message.block: {pair}}, REFUSED, what, message.peer)

    # ── time ────────────────────────────────────────────────────────────────────────────────────────────────

    def missed(self, peer: str, message: m.Missed) -> None:
        """Note the parts that `peer` missed when the last plan timed out."""
        if peer in self._roster:
            self._missed[peer] = message

    def late(self) -> bool:
        """Handle a time-out. Returns whether the next plan needs other reducers, by members' statements."""
        missed = {peer: word for peer, word in self._missed.items() if peer in self._roster}
        self._missed = {}
        waited_for = {
            (peer, other)
            for peer, word in missed.items()
            for other in self._roster.keys() & {*word.parts, *word.sums} - {peer}
            if other in word.parts or not (other in missed and missed[other].parts)
        }
        accused = {other for _, other in waited_for}
        if any(
            2 * len(accused.intersection(cover.receivers)) > len(cover.receivers)
            for cover in self._covers.values()
        ):
            return False  # most are waited for: it is slow, and nobody's doing
        pairs = {frozenset(pair) for pair in waited_for}
        new = self.known.add(pairs, late=True)
        self._note(new, "one waits for the other")
        between = [
            cover for cover in self._covers.values() if any(pair <= {*cover.receivers} for pair in pairs)
        ]
        stuck = [cover.block for cover in between if not self._has_reducers(cover.block)]
        out = self._shunned(pairs, late=True)
        if pairs and stuck and not out:
            out = {self.known.blamed({peer for pair in pairs for peer in pair})}
        self._go(out, LATE)
        self.known.waited_in_vain(out)
        return bool(new) and not stuck

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _follow(
        self,
        pairs: set[Pair],
        about: Mapping[int, Collection[Pair]],
        why: str,
        what: str,
        accused: str = "",
    ) -> bool:
        """Note disputes of `pairs` `about` blocks; `what` goes into the log.

        Returns whether reducers are left; if not, or most are against one peer, one is fenced with `why`.
        """
        new = self.known.add(pairs)
        self._note(new, what)
        shunned = self._shunned(pairs)
        out = shunned
        for block, theirs in about.items():
            if not out and theirs and not (new and self._has_reducers(block)):
                out = {self.known.blamed({peer for pair in theirs for peer in pair}, accused)}
        self._go(out, why, shunned=shunned)
        return not out

    def _note(self, pairs: Iterable[Pair], what: str) -> None:
        known = sorted(map(sorted, pairs))
        if known:
            self._news.append({"pairs": known[:MOST_NAMED], "of": len(known), "why": what})

    def _go(self, peers: Iterable[str], why: str, shunned: Collection[str] = ()) -> None:
        """Fence `peers`; those in `shunned` because most others' statements are against theirs."""
        for peer in peers:
            self.known.fenced(peer, shunned=peer in shunned)
            self._out[peer] = why

    def _has_reducers(self, block: int) -> bool:
        """Whether a holder is left that may reduce `block`."""
        cover = self._covers[block]
        return bool(reducers(self.known, cover.receivers, {*dict(cover.slots), *cover.observers}))

    def _shunned(self, pairs: Iterable[Pair], *, late: bool = False) -> set[str]:
        """Peers in `pairs` that are in dispute with most other holders of one of their blocks."""
        concerned = {peer for pair in pairs for peer in pair}
        found: set[str] = set()
        for cover in self._covers.values():
            if not concerned.isdisjoint(cover.receivers):
                found |= self.known.shunned(cover.receivers, late=late)
        return found & concerned


def reducers(known: DisputedPairs, holders: tuple[str, ...], others: Collection[str]) -> tuple[str, ...]:
    """Holders that may reduce their block for all holders and for `others`, who send or receive its sums."""
    return known.fit(holders, {*others, *holders})
