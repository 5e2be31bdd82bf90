"""Averagings of a grouped run: clusters add up their parameters, or copies of them, and all install the mean.

Pure. A cluster takes part in one averaging at a time, and trains `interval` batches between two of them. An
averaging has plans and votes as a step has. Clusters that fall apart are left out of the next plan. It always
ends in a decision, even if only one cluster is left. A decided mean is *promised* to its clusters: each
installs it between two steps (docs/averaging.md, "Delayed averagings"), or in its place among steps that
overlap (mean_order.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.conduct.disputed_pairs import DisputedPairs
from hetpeer.bootstrap.coordinator.reduction import Reduce
from hetpeer.bootstrap.log.history import Record
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
        self._incarnations = {
            peer: contexts[cluster].members.volunteers[peer].incarnation
            for cluster, roster in self._rosters.items()
            for peer in roster
        }
        uplinks = {v.peer: v.uplink for context in contexts.values() for v in context.members.ready()}
        first = next(iter(contexts.values()))
        self._blocks = first.members.blocks
        self.reduce = Reduce(first.config, uplinks, ReduceComplaints(known, first.config.ties), timeouts)

    @property
    def clusters(self) -> tuple[int, ...]:
        """Clusters that take part."""
        return tuple(self._rosters)

    @property
    def copies(self) -> dict[int, int]:
        """Cluster → the version of its parameters that is averaged."""
        return {cluster: self._copies[cluster][1] for cluster in self._rosters}

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
        """Note what a member says of the plan. The last vote decides."""
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

    def without(self, clusters: Iterable[int], now: float) -> list[Effect]:
        """Go on without `clusters`, which have fallen apart, if others are left."""
        gone = tuple(sorted(peer for cluster in clusters for peer in self._rosters.pop(cluster)))
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


class Averagings:
    """All averagings. Methods take clusters by number. `interval` and `delayed`: the run's settings."""

    def __init__(self, interval: int, *, delayed: bool) -> None:
        self._interval = interval
        self._delayed = delayed
        self._rounds: dict[int, AveragingRound] = {}
        """Cluster → the averaging that it takes part in."""
        self.promised: dict[int, Record] = {}
        """Cluster → the log fields of the mean that it will install."""
        self._since: dict[int, int] = {}
        """Cluster → the version from which its training counts: when it was founded, joined a group or went
        on alone, plus one for each averaging that it has installed since.
        """
        self.took_s = 0.0
        """Seconds of the last averaging; 0 before the first."""
        self._groups = 0
        """Number of the last group; no number is used twice."""
        self._timeouts = AdaptiveTimeouts()
        self.disputed_pairs = DisputedPairs()

    def add(self, record: Record) -> None:
        """Fold one more record of the log."""
        match record["kind"]:
            case "average" | "installed":
                self._groups = max(self._groups, record["group"])
                self.took_s = float(record.get("seconds", 0.0))
                self._since |= dict(record["clusters"] if record["kind"] == "average" else ())
                for cluster, _ in record["installed"]:
                    self._since[cluster] += 1
                    self.promised.pop(cluster, None)
            case "founded":
                self._since[record["cluster"]] = record["version"]
            case "dissolved":
                self.promised.pop(record["cluster"], None)
            case _:
                pass

    # ── who stands where ────────────────────────────────────────────────────────────────────────────────────

    def under_way(self) -> list[AveragingRound]:
        """The averagings under way, each once."""
        return list(dict.fromkeys(self._rounds.values()))

    def of(self, cluster: int) -> AveragingRound | None:
        """The averaging that `cluster` takes part in."""
        return self._rounds.get(cluster)

    def busy(self, cluster: int) -> bool:
        """Whether `cluster` takes part in an averaging, or will install one."""
        return cluster in self._rounds or cluster in self.promised

    def stands_still(self, cluster: int) -> bool:
        """Whether `cluster` must not train: its own parameters are averaged, and no copy of them."""
        one = self._rounds.get(cluster)
        return one is not None and not one.delayed

    def trained(self, cluster: int, version: int) -> int:
        """Batches that `cluster` has trained at `version` since its last group."""
        return version - self._since.get(cluster, 0)

    def due(self, cluster: int, version: int) -> bool:
        """Whether `cluster`, at `version`, has trained enough batches since its last group."""
        return self.trained(cluster, version) >= self._interval

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────────

    def skip(self, cluster: int, version: int) -> None:
        """Note that `cluster` found no others at `version`: it trains on as if it had averaged."""
        self._since[cluster] = version

    def begin(self, contexts: Mapping[int, CoordinatorContext], now: float, *, last: bool) -> list[Effect]:
        """Begin an averaging of two or more clusters. `last`: nobody trains on meanwhile."""
        self._groups += 1
        one = AveragingRound(
            self._groups,
            contexts,
            self.disputed_pairs,
            self._timeouts,
            now,
            delayed=self._delayed and not last,
        )
        self._rounds |= dict.fromkeys(one.clusters, one)
        self._since |= one.copies
        return one.begin(now)

    def tick(self, now: float) -> list[Effect]:
        """Check timeouts of all plans."""
        return [effect for one in self.under_way() for effect in one.tick(now)]

    def without(self, clusters: Iterable[int], now: float) -> list[Effect]:
        """Go on without `clusters`, which have fallen apart."""
        gone = set(clusters)
        effects: list[Effect] = []
        for one in dict.fromkeys(self._rounds.pop(number) for number in gone & self._rounds.keys()):
            effects += one.without(gone.intersection(one.clusters), now)
        return effects

    def decided(self, now: float) -> dict[str, Any] | None:
        """Log fields of a decided averaging, promised to its clusters from now on; None if there is none."""
        one = next((one for one in self.under_way() if one.reduce.decision is not None), None)
        if one is None:
            return None
        record = one.decided(now)
        self._timeouts.committed()
        self.disputed_pairs.committed()
        for cluster in one.clusters:
            del self._rounds[cluster]
            self.promised[cluster] = record
        return record
