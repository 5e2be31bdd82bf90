"""The averagings of a grouped run: those under way, and those that are decided and not yet installed.

Pure. A cluster takes part in one averaging at a time, and trains `interval` batches from one to the next. When an averaging is decided, its mean is
*promised* to its clusters: each installs it when it stands between two steps. Docs: averaging.md, "Delayed averagings".
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
    """All methods take clusters by their numbers. `interval` and `delayed`: as the run's settings."""

    def __init__(self, interval: int, *, delayed: bool) -> None:
        self._interval = interval
        self._delayed = delayed
        self._rounds: dict[int, AveragingRound] = {}
        """Cluster → what it takes part in."""
        self._promised: dict[int, Record] = {}
        """Cluster → what it will install."""
        self._since: dict[int, int] = {}
        """Cluster → its version when it was founded, joined a group or was let go on alone, and one more for each averaging that it has
        installed since: what it trains counts from there.
        """
        self._groups = 0
        """The last group. No number is used twice."""
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
        """Each once."""
        return list(dict.fromkeys(self._rounds.values()))

    def of(self, cluster: int) -> AveragingRound | None:
        """What it takes part in."""
        return self._rounds.get(cluster)

    def busy(self, cluster: int) -> bool:
        """Whether it takes part in one, or is to install one."""
        return cluster in self._rounds or cluster in self._promised

    def stops(self, cluster: int) -> bool:
        """Whether it is to stand still: its parameters themselves are averaged, or a mean is to be installed."""
        one = self._rounds.get(cluster)
        return cluster in self._promised or (one is not None and not one.delayed)

    def due(self, cluster: int, version: int) -> bool:
        """Whether, at `version`, it has trained its batches since it joined a group."""
        return version - self._since.get(cluster, 0) >= self._interval

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────────

    def skip(self, cluster: int, version: int) -> None:
        """It found no others at `version`: it trains on as if it had averaged."""
        self._since[cluster] = version

    def begin(self, reigns: Mapping[int, CoordinatorContext], now: float, *, last: bool) -> list[Effect]:
        """Clusters with these reigns, two or more, average; `last`: nothing is trained after it, so nobody trains on meanwhile."""
        self._groups += 1
        one = AveragingRound(
            self._groups, reigns, self.disputed_pairs, self._timeouts, now, delayed=self._delayed and not last
        )
        self._rounds |= dict.fromkeys(one.clusters, one)
        self._since |= one.copies
        return one.begin(now)

    def tick(self, now: float) -> list[Effect]:
        """Time passes."""
        return [effect for one in self.under_way() for effect in one.tick(now)]

    def without(self, clusters: Iterable[int], now: float) -> list[Effect]:
        """`clusters` have fallen apart; who averages with them goes on without."""
        gone = set(clusters)
        effects: list[Effect] = []
        for one in dict.fromkeys(self._rounds.pop(number) for number in gone & self._rounds.keys()):
            effects += one.without(gone.intersection(one.clusters), now)
        return effects

    def decided(self, now: float) -> dict[str, Any] | None:
        """What the log is to say of one that has been decided: it is promised to its clusters from here on."""
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
        """Cluster → the averaging that it is to install."""
        return self._promised
