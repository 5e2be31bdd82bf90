"""What follows from what the members of a reduce say against each other (docs/trust.md, "Disputes in a reduce").

Pure. Votes that differ, a sum that is no number, a part that cannot be added, a plan that runs out of time: each is somebody's doing, and another one's word. So the next plan lets neither add up
for the other; who is in quarrel with most others is turned out, and one of two where nobody else is left to add up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.disputed_pairs import DisputedPairs, Pair
from hetpeer.bootstrap.state.membership import Range
from hetpeer.bootstrap.trust.vote_splits import quarrels, spoilers

DIFFERS = "what it says of sums is not what others say"
SPOILS = "what it adds up is no number"
REFUSED = "parts that it has sent or refused could not be added"
FALSE = "what it has sent or added up is not what it says, or what others say"
CONTRADICTS = "what it says of the shares of a block is not what it has said of the whole"
HUGE = "what it counts is so much more than what others do that nothing would be left of theirs in a sum"
MOST_NAMED = 16
"""Pairs in one line of the log."""
LATE = "others wait for it in vain, or it for them"


class ReduceComplaints:
    """Those of one reduce; `known` is what is known by now, of earlier ones, too, `ties` the blocks that share a parameter with one."""

    def __init__(self, known: DisputedPairs, ties: Mapping[int, Collection[int]]) -> None:
        self._known = known
        self._ties = ties
        self._covers: Mapping[int, m.Cover] = {}
        self._roster: Mapping[str, Range] = {}
        self._out: dict[str, str] = {}
        self._news: list[dict[str, Any]] = []
        self._missed: dict[str, m.Missed] = {}
        """What has not come when the last plan ran out of time, as its members say."""

    def begin(self, covers: Iterable[m.Cover], roster: Mapping[str, Range]) -> tuple[int, ...]:
        """A new plan. Returns the blocks whose votes are to name what has come from each reducer."""
        self._covers = {cover.block: cover for cover in covers}
        self._roster = roster
        return self._known.closely(self._covers)

    def news(self) -> list[dict[str, Any]]:
        """What the log is to say since this was last asked: who is in quarrel with whom, and why."""
        news, self._news = self._news, []
        return news

    @property
    def pending(self) -> bool:
        """Whether somebody is to be turned out."""
        return bool(self._out)

    def turned_out(self) -> dict[str, str]:
        """Who is to come back as another, with the reason, since this was last asked."""
        out, self._out = self._out, {}
        return out

    # ── votes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def look_closely(self, blocks: Collection[int]) -> None:
        """Votes on these have differed, or were on something that is no number."""
        self._known.look_closely(blocks)

    def torn(self, votes: Mapping[str, m.Vote], blocks: Iterable[int]) -> bool:
        """Votes on `blocks` differ, and name what has come from whom. Whether another plan helps; else somebody is turned out."""
        found = {block: quarrels(votes, block) for block in blocks}
        what = f"they say different things of a sum of block {min(found)}"
        return self._follow({pair for pairs in found.values() for pair in pairs}, found, DIFFERS, what)

    def spoilt(self, votes: Mapping[str, m.Vote], block: int) -> bool:
        """All have the same of `block`, and it is no number. Whether another plan helps; else whoever has added it up is turned out."""
        concerned = [
            cover for cover in self._covers.values() if cover.block in (block, *self._ties.get(block, ()))
        ]
        found = spoilers(votes, block, {peer for cover in concerned for peer, _ in cover.reducers})
        for peer in found:
            self._known.spoils(peer)
        if found and self._has_reducers(block):
            return True
        self._go(found or {self._known.blamed(self._covers[block].receivers)}, SPOILS, shunned=found)
        return False

    def overflows(self, block: int) -> bool:
        """Whether all of several holders have added up something of `block` that is no number: it must be the model's doing."""
        return self._known.have_all_spoilt(self._covers[block].receivers)

    def proven(self, pairs: Mapping[int, set[Pair]]) -> None:
        """Block → who says something else than another of what was sent and added up there."""
        everybody = {pair for theirs in pairs.values() for pair in theirs}
        self._note(
            self._known.add(everybody),
            f"a sum of block {min(pairs)} is not what was sent, or one of them says so falsely",
        )
        out = shunned = self._shunned(everybody)
        for block, theirs in pairs.items():
            if not out and not self._has_reducers(block):
                out = {self._known.blamed({peer for pair in theirs for peer in pair})}
        self._go(out, FALSE, shunned=shunned)

    def drowns(self, peers: Collection[str]) -> None:
        """What these have sent is so long that nothing would be left of what others have. It may be the model's doing, or a sample's."""
        self._go(peers, HUGE)

    def contradict(self, peers: Collection[str]) -> None:
        """These have said one thing of a whole, and another of its shares: nobody else's word is needed."""
        self._go(peers, CONTRADICTS, shunned=peers)

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def objected(self, peer: str, message: m.Objection, plan: int) -> bool:
        """A reducer of `plan`, the latest, cannot add what another has sent. Whether another plan is needed, and helps."""
        cover = self._covers.get(message.block)
        if cover is None or message.plan != plan or message.peer == peer:
            return False
        if peer not in dict(cover.reducers) or message.peer not in dict(cover.slots):
            return False
        pair = frozenset((peer, message.peer))
        what = f"what {message.peer} sent of block {message.block} cannot be added: {message.why}"
        return self._follow({pair}, {message.block: {pair}}, REFUSED, what, message.peer)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def missed(self, peer: str, message: m.Missed) -> None:
        """What has not come to `peer` of the plan that ran out of time last."""
        if peer in self._roster:
            self._missed[peer] = message

    def late(self) -> bool:
        """One more plan has run out of time. Whether others than before are to add up in the next one, by what was said of the one before."""
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
        new = self._known.add(pairs, late=True)
        self._note(new, "one waits for the other")
        between = [
            cover for cover in self._covers.values() if any(pair <= {*cover.receivers} for pair in pairs)
        ]
        stuck = [cover.block for cover in between if not self._has_reducers(cover.block)]
        out = self._shunned(pairs, late=True)
        if pairs and stuck and not out:
            out = {self._known.blamed({peer for pair in pairs for peer in pair})}
        self._go(out, LATE)
        self._known.waited_in_vain(out)
        return bool(new) and not stuck

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _follow(
        self,
        pairs: set[Pair],
        about: Mapping[int, Collection[Pair]],
        why: str,
        what: str,
        accused: str = "",
    ) -> bool:
        """They are in quarrel, `about` these blocks, as the log is told (`what`). Whether there are others to add them up; else, or where most are against one,
        somebody is turned out (`why`).
        """
        new = self._known.add(pairs)
        self._note(new, what)
        shunned = self._shunned(pairs)
        out = shunned
        for block, theirs in about.items():
            if not out and theirs and not (new and self._has_reducers(block)):
                out = {self._known.blamed({peer for pair in theirs for peer in pair}, accused)}
        self._go(out, why, shunned=shunned)
        return not out

    def _note(self, pairs: Iterable[Pair], what: str) -> None:
        known = sorted(map(sorted, pairs))
        if known:
            self._news.append({"pairs": known[:MOST_NAMED], "of": len(known), "why": what})

    def _go(self, peers: Iterable[str], why: str, shunned: Collection[str] = ()) -> None:
        """They are turned out, those who are `shunned` because most others' words are against theirs."""
        for peer in peers:
            self._known.turned_out(peer, shunned=peer in shunned)
            self._out[peer] = why

    def _has_reducers(self, block: int) -> bool:
        """Whether somebody is left who may add up `block`."""
        cover = self._covers[block]
        return bool(reducers(self._known, cover.receivers, {*dict(cover.slots), *cover.observers}))

    def _shunned(self, pairs: Iterable[Pair], *, late: bool = False) -> set[str]:
        """Who of these has most others against it who hold a block of its own."""
        concerned = {peer for pair in pairs for peer in pair}
        found: set[str] = set()
        for cover in self._covers.values():
            if not concerned.isdisjoint(cover.receivers):
                found |= self._known.shunned(cover.receivers, late=late)
        return found & concerned


def reducers(known: DisputedPairs, holders: tuple[str, ...], others: Collection[str]) -> tuple[str, ...]:
    """Which holders of a block may add it up for all of them, and for the `others` who have sums of it or get some."""
    return known.fit(holders, {*others, *holders})
