"""One averaging of a group of clusters: its members, plans and votes.

Pure. It has plans and votes as a step has, with clusters for ids: one holder of each cluster gives a block,
and all holders get the sum. Members that leave, and clusters that cannot give all blocks any more, are left
out of the next plan. It always ends in a decision, even if only one cluster is left (docs/grouped.md,
"Grouped runs").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.conduct.disputed_pairs import DisputedPairs
from hetpeer.bootstrap.coordinator.reduction import Reduce
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect, Send
from hetpeer.bootstrap.state.timeouts import AdaptiveTimeouts
from hetpeer.bootstrap.trust.reduce_complaints import ReduceComplaints


class AveragingRound:
    """Group `number` of clusters, all whole; `delayed`: they train on meanwhile."""

    def __init__(
        self,
        number: int,
        contexts: Mapping[int, CoordinatorContext],
        known: DisputedPairs,
        timeouts: AdaptiveTimeouts,
        now: float,
        *,
        delayed: bool,
    ) -> None:
        self.number = number
        self.delayed = delayed
        self.began_at = now
        self._copies = {
            cluster: (context.line, context.history.version) for cluster, context in sorted(contexts.items())
        }
        self._rosters = {
            cluster: dict(context.members.roster()) for cluster, context in sorted(contexts.items())
        }
        self._contexts = dict(contexts)
        self._sessions = {
            cluster: {v.peer: v for v in context.members.ready()} for cluster, context in contexts.items()
        }
        self._incarnations = {
            peer: contexts[cluster].members.volunteers[peer].incarnation
            for cluster, roster in self._rosters.items()
            for peer in roster
        }
        uplinks = {v.peer: v.uplink for context in contexts.values() for v in context.members.ready()}
        first = next(iter(contexts.values()))
        self._blocks = first.members.blocks
        self.reduce = Reduce(
            first.config,
            uplinks,
            ReduceComplaints(known, first.config.ties),
            timeouts,
            by_all=first.config.averaging_sparse,
        )

    @property
    def clusters(self) -> tuple[int, ...]:
        """Clusters that take part."""
        return tuple(self._rosters)

    @property
    def copies(self) -> dict[int, int]:
        """Cluster → the version of its parameters that is averaged."""
        return {cluster: self._copies[cluster][1] for cluster in self._rosters}

    def members(self, cluster: int) -> dict[str, Range]:
        """Members of `cluster` → their blocks."""
        return self._rosters[cluster]

    def roster(self) -> dict[str, Range]:
        """Member of any cluster → its blocks."""
        return {peer: place for roster in self._rosters.values() for peer, place in roster.items()}

    def begin(self, now: float) -> list[Effect]:
        """Begin messages for all members, and the first plan."""
        roster = self.roster()
        told: list[Effect] = [
            Send(
                peer,
                m.Begin(
                    line=line,
                    step=version,
                    batch=0,
                    group=self.number,
                    delayed=self.delayed,
                    microbatches=0,
                    roster=roster,
                    incarnations=self._incarnations,
                    tasks=(),
                ),
            )
            for peer, (line, version) in self._addresses()
        ]
        return told + self._plan(now)

    def _addresses(self) -> Iterable[tuple[str, tuple[m.TermView, int]]]:
        """Each member, with its term and view, and the version that is averaged."""
        return ((peer, self._copies[c]) for c, roster in self._rosters.items() for peer in sorted(roster))

    def _plan(self, now: float) -> list[Effect]:
        """Make a new reduce plan and send it to every member."""
        covers = self.reduce.make(self._contributions(), self.roster(), now)
        return [
            Send(
                peer,
                m.Plan(
                    line=line,
                    step=version,
                    group=self.number,
                    plan=self.reduce.plan,
                    covers=covers[peer],
                    closely=self.reduce.closely,
                ),
            )
            for peer, (line, version) in self._addresses()
        ]

    def _contributions(self) -> dict[int, list[tuple[str, tuple[int, ...]]]]:
        """Block → one holder of each cluster, in the clusters' order; the work is shared within a cluster."""
        load: Counter[str] = Counter()
        sums: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        for block in range(self._blocks):
            sums[block] = []
            for cluster, roster in self._rosters.items():
                holders = sorted(peer for peer, (i, j) in roster.items() if i <= block < j)
                sender = min(holders, key=lambda peer: load[peer])
                load[sender] += 1
                sums[block].append((sender, (cluster,)))
        return sums

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, peer: str, message: m.Message, now: float) -> list[Effect]:
        """Note what a member says of the plan. The last vote decides.

        A holder that came to its cluster later, or was struck off, has no part in the plan and no word.
        """
        if peer not in self.roster():
            return []
        match message:
            case m.Vote() if self.reduce.vote(peer, message, self.roster(), now):
                return self._plan(now)
            case m.Objection() if self.reduce.objected(peer, message):
                return self._plan(now)
            case m.Reducing():
                self.reduce.moves(peer, message, now)
            case m.Missed():
                self.reduce.missed(peer, message)
            case _:
                pass
        return []

    def strike(self) -> list[str]:
        """Strike off members that are no holders of their cluster's version any more; returns them.

        What comes back, or comes later, has no copy or no part of the mean.
        """
        gone: list[str] = []
        for cluster, roster in self._rosters.items():
            members, sessions = self._contexts[cluster].members, self._sessions[cluster]
            ready = members.roster()
            left = [p for p in roster if p not in ready or members.volunteers[p] is not sessions[p]]
            for peer in left:
                del roster[peer]
            gone += left
        return gone

    @property
    def torn(self) -> list[int]:
        """Clusters that cannot give all blocks any more."""
        return [c for c, roster in self._rosters.items() if self._contexts[c].members.uncovered(roster)]

    def without(self, clusters: Iterable[int], now: float, left: Sequence[str] = ()) -> list[Effect]:
        """Go on without `clusters`, and without the struck members `left`, if others remain."""
        gone = tuple(sorted({*left, *(peer for cluster in clusters for peer in self._rosters.pop(cluster))}))
        self.reduce.left()
        told: list[Effect] = [
            Send(peer, m.Gone(line=line, group=self.number, peers=gone))
            for peer, (line, _) in self._addresses()
        ]
        return told + self._plan(now) if self._rosters else []

    def tick(self, now: float) -> list[Effect]:
        """Make a plan anew that times out."""
        return self._plan(now) if self.reduce.overdue(now) and self.reduce.ran_out() else []

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────

    def decided(self, now: float) -> dict[str, Any]:
        """Log fields of the averaging, also for clusters that install it later."""
        assert self.reduce.decision is not None
        return {
            "term": next(iter(self._copies.values()))[0].term,
            "group": self.number,
            "plan": self.reduce.plan,
            "clusters": list(self.copies.items()),
            "sums": {block: vote.digest for block, vote in sorted(self.reduce.decision.items())},
            "seconds": now - self.began_at,
        }
