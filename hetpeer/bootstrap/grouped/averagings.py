"""Averagings of a grouped run: clusters add up their parameters, or copies of them, and all install the mean.

Pure. A cluster takes part in one averaging at a time, and trains `interval` batches between two of them
(averaging_round.py). A decided mean is *promised* to its clusters: each installs it between two steps
(docs/grouped.md, "Delayed averagings"), or in its place among steps that overlap (mean_order.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.conduct.disputed_pairs import DisputedPairs
from hetpeer.bootstrap.grouped.averaging_round import AveragingRound
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect
from hetpeer.bootstrap.state.timeouts import AdaptiveTimeouts


class Averagings:
    """All averagings. Methods take clusters by number. `interval`, `delayed`, `sparse`: the run's settings.

    Sparse ones are of all clusters, each time, so that all have the same anchor.
    """

    def __init__(self, interval: int, *, delayed: bool, sparse: bool = False) -> None:
        self._interval = interval
        self._delayed = delayed
        self.sparse = sparse
        self.called = False
        """Whether a cluster waits for all others: then each is due at its next barrier. Only sparse ones."""
        self.put_off = False
        """Whether no cluster is due before another one is founded. Only sparse ones."""
        self._last: dict[int, int] = {}
        """Cluster → the step as which it installed its last mean."""
        self._unstored = False
        """Whether something was averaged that is not in the last checkpoint."""
        self._rounds: dict[int, AveragingRound] = {}
        """Cluster → the averaging that it takes part in."""
        self.promised: dict[int, Record] = {}
        """Cluster → the log fields of the mean that it will install."""
        self._taken: dict[int, AveragingRound] = {}
        """Cluster → the averaging whose mean that is."""
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
                self._unstored |= record["kind"] == "average"
                self._last |= dict(record["installed"])
                self._groups = max(self._groups, record["group"])
                self.took_s = float(record.get("seconds", 0.0))
                self._since |= dict(record["clusters"] if record["kind"] == "average" else ())
                for cluster, _ in record["installed"]:
                    self._since[cluster] += 1
                    self._forget(cluster)
            case "founded":
                self._since[record["cluster"]] = record["version"]
            case "checkpoint":
                self._unstored = record["version"] <= self._last.get(record.get("cluster", 0), -1)
            case "rollback":
                self._go_back(record.get("cluster", 0), record["to_version"])
            case "dissolved":
                self._last.pop(record["cluster"], None)
                self._forget(record["cluster"])
            case _:
                pass

    def _go_back(self, cluster: int, version: int) -> None:
        """Note that `cluster` goes on with `version` in a new view, without a mean that it was to install."""
        self._forget(cluster)
        self._since[cluster] = min(self._since.get(cluster, 0), version)
        if self._last.get(cluster, -1) >= version:
            self._last[cluster] = version - 1
            self._unstored = False  # where anchors matter, no other cluster has that mean (`may_go_back`)

    def _forget(self, cluster: int) -> None:
        """Drop the mean that `cluster` has installed, or will not."""
        self.promised.pop(cluster, None)
        self._taken.pop(cluster, None)

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

    def members(self, cluster: int) -> Mapping[str, Range]:
        """Holders in `cluster` that have the mean which it will install → their blocks."""
        return self._taken[cluster].members(cluster)

    def due(self, cluster: int, version: int) -> bool:
        """Whether `cluster`, at `version`, has trained enough batches since its last group."""
        return self.called or (not self.put_off and self.trained(cluster, version) >= self._interval)

    @property
    def unstored(self) -> bool:
        """Whether the anchor of all clusters is not in the last checkpoint."""
        return self.sparse and self._unstored

    @property
    def may_found(self) -> bool:
        """Whether a cluster that is founded now has the anchor of all others in their next averaging.

        They wait for it; so none is founded while some wait already.
        """
        return not (self.unstored or (self.sparse and (self._rounds or self.called)))

    @property
    def may_go_back(self) -> bool:
        """Whether a cluster that goes back to the last checkpoint has the anchor of all others there."""
        return not self.unstored

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────────

    def skip(self, cluster: int, version: int) -> None:
        """Note that `cluster` found no others at `version`: it trains on as if it had averaged."""
        self._since[cluster] = version

    def begin(self, contexts: Mapping[int, CoordinatorContext], now: float, *, last: bool) -> list[Effect]:
        """Begin an averaging of clusters. `last`: nobody trains on meanwhile."""
        self._groups += 1
        self.called = False
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

    def without(self, fallen: Collection[int], now: float) -> list[Effect]:
        """Go on without the clusters `fallen`, which have fallen apart, and without members that do not hold
        their cluster's version any more; a cluster that lacks a block for that leaves its group.
        """
        effects: list[Effect] = []
        for one in self.under_way():
            left = one.strike()
            out = sorted({*one.torn, *fallen}.intersection(one.clusters)) if left or fallen else []
            for cluster in out:
                del self._rounds[cluster]
            effects += one.without(out, now, left) if left or out else []
        for one in dict.fromkeys(self._taken.values()):
            one.strike()
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
            self.promised[cluster], self._taken[cluster] = record, one
        return record
