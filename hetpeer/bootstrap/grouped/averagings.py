"""Averagings of a grouped run: those under way, and those that are decided and not yet installed.

Pure. A cluster takes part in one averaging at a time, and trains `interval` batches between two of them. A
decided mean is *promised* to its clusters: each installs it between two steps (docs/averaging.md, "Delayed
averagings").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hetpeer.bootstrap.conduct.disputed_pairs import DisputedPairs
from hetpeer.bootstrap.grouped.averaging_round import AveragingRound
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect
from hetpeer.bootstrap.state.timeouts import AdaptiveTimeouts

Record = Mapping[str, Any]


class Averagings:
    """All averagings. Methods take clusters by number. `interval` and `delayed`: the run's settings."""

    def __init__(self, interval: int, *, delayed: bool) -> None:
        self._interval = interval
        self._delayed = delayed
        self._rounds: dict[int, AveragingRound] = {}
        """Cluster → the averaging that it takes part in."""
        self._promised: dict[int, Record] = {}
        """Cluster → the log fields of the mean that it will install."""
        self._since: dict[int, int] = {}
        """Cluster → the version from which its training counts: when it was founded, joined a group or went
        on alone, plus one for each averaging that it has installed since.
        """
        self._groups = 0
        """Number of the last group; no number is used twice."""
        self._timeouts = AdaptiveTimeouts()
        self.disputed_pairs = DisputedPairs()

    def add(self, record: Record) -> None:
        """Fold one more record of the log."""
        match record["kind"]:
            case "average" | "installed":
                self._groups = max(self._groups, record["group"])
                self._since |= dict(record["clusters"] if record["kind"] == "average" else ())
                for cluster, _ in record["installed"]:
                    self._since[cluster] += 1
                    self._promised.pop(cluster, None)
            case "founded":
                self._since[record["cluster"]] = record["version"]
            case "dissolved":
                self._promised.pop(record["cluster"], None)
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
        """Whether it takes part in an averaging, or will install one."""
        return cluster in self._rounds or cluster in self._promised

    def stops(self, cluster: int) -> bool:
        """Whether it must stand still: its own parameters are averaged, or it will install a mean."""
        one = self._rounds.get(cluster)
        return cluster in self._promised or (one is not None and not one.delayed)

    def due(self, cluster: int, version: int) -> bool:
        """Whether, at `version`, it has trained its batches since it joined a group."""
        return version - self._since.get(cluster, 0) >= self._interval

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────────

    def skip(self, cluster: int, version: int) -> None:
        """Note that it found no others at `version`: it trains on as if it had averaged."""
        self._since[cluster] = version

    def begin(self, contexts: Mapping[int, CoordinatorContext], now: float, *, last: bool) -> list[Effect]:
        """Begin an averaging of two or more clusters with these contexts.

        `last`: nobody trains on meanwhile.
        """
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
        """Log fields of an averaging that has been decided, which is promised to its clusters from now on;
        None if there is none.
        """
        one = next((one for one in self.under_way() if one.reduce.decision is not None), None)
        if one is None:
            return None
        record = one.decided(now)
        self._timeouts.committed()
        self.disputed_pairs.committed()
        for cluster in one.clusters:
            del self._rounds[cluster]
            self._promised[cluster] = record
        return record

    def promised(self) -> Mapping[int, Record]:
        """Cluster → log fields of the averaging that it will install."""
        return self._promised
