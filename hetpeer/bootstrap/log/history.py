"""The surviving history of a run: what the coordinator's log says, folded into one value.

Pure. Records are plain dicts as bootstrap/log/record_log.py keeps them. A roll-back to version v takes back every commit of a
step >= v that came before it; what remains is the curve that the run's author sees. In a grouped run each cluster has a
history of its own in the same log: records name their cluster (none: 0), an averaging names those that took part, and those that have installed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Record = Mapping[str, Any]
RECENT = 64
"""Commits that are looked up by who is not to keep the whole history."""


@dataclass(slots=True)
class History:
    """Folded log: `version` updates are committed; `commits[step]` and `evaluations[step]` are the surviving ones."""

    cluster: int = 0
    whole: bool = True
    """Whether all commits and averagings are kept, not only those of the RECENT steps: a long run's are many."""
    term: int = 0
    view: int = 0
    version: int = 0
    commits: dict[int, Record] = field(default_factory=dict)
    averages: dict[int, Record] = field(default_factory=dict)
    """Step → the averaging with other clusters that it was."""
    evaluations: dict[int, float] = field(default_factory=dict)
    checkpoint: Record | None = None
    """The last one, whatever cluster it is of."""
    sealed: int | None = 0
    """The version of this history that lies complete in the checkpoint store, if one does."""
    base: Record | None = None
    """The checkpoint that this is; None: the initial state."""
    rollbacks: int = 0
    amendment: str = ""
    """The last one of the manifest, in hexadecimal."""
    amended: int = 0
    """Its number: of two with one number the one that was recorded first counts."""
    arranged: Sequence[Sequence[Sequence[int]]] = ()
    """How the first clusters cut the blocks since volunteers were moved last."""
    cut: Sequence[Sequence[int]] | None = None
    """How this cluster of a grouped run cuts the blocks, if it was founded with a cut of its own."""
    departures: Counter[str] = field(default_factory=Counter)
    """Peer → how often it has gone, one way or another."""
    contributors: dict[str, int] = field(default_factory=dict)
    """Peer → the number by which commits, of any cluster, name it (credit.py)."""

    @classmethod
    def of(cls, records: Iterable[Record], cluster: int = 0, *, whole: bool = True) -> History:
        """The history that `records` tell of `cluster`, in order."""
        history = cls(cluster, whole)
        for record in records:
            history.add(record)
        return history

    def add(self, record: Record) -> None:
        """Fold one more record."""
        for peer in record.get("newcomers", ()):
            self.contributors[peer] = len(self.contributors)
        match record["kind"]:
            case "reign":
                self.term = int(record["term"])
            case "amendment":
                if int(record["sequence"]) > self.amended:
                    self.amended, self.amendment = int(record["sequence"]), str(record["data"])
            case "arranged":
                self.arranged = record["layouts"]
            case "gone":
                self.departures[str(record["peer"])] += 1
            case "average" | "installed":
                for cluster, step in record["installed"]:
                    if cluster == self.cluster:
                        self._keep(self.averages, step, record)
                        self.version = step + 1
            case "checkpoint":
                own = record.get("cluster", 0) == self.cluster
                self.checkpoint, self.sealed = record, int(record["version"]) if own else None
                self.base = record
            case _ if record.get("cluster", 0) == self.cluster:
                self._add_own(record)
            case _:
                pass

    def _add_own(self, record: Record) -> None:
        match record["kind"]:
            case "commit":
                self.version = int(record["step"]) + 1
                self._keep(self.commits, int(record["step"]), record)
            case "evaluation":
                self.evaluations[int(record["step"])] = float(record["loss"])
            case "founded":
                self.version = self.sealed = int(record["version"])
                self.base = self.checkpoint
                self.cut = record.get("layout")
            case "rollback":
                self.view = int(record["view"])
                if self.version != int(record["to_version"]):  # else the steps under way are begun anew
                    self.version = self.sealed = int(record["to_version"])
                self.rollbacks += 1
                self.commits = {s: c for s, c in self.commits.items() if s < self.version}
                self.evaluations = {s: x for s, x in self.evaluations.items() if s <= self.version}
            case _:
                pass

    def _keep(self, steps: dict[int, Record], step: int, record: Record) -> None:
        steps[step] = record
        while not self.whole and (oldest := next(iter(steps))) <= step - RECENT:
            del steps[oldest]

    def of_another(self, cluster: int) -> History:
        """What the same records tell of `cluster`, if none of them is its own or this one's."""
        return replace(
            self,
            cluster=cluster,
            commits=dict(self.commits),
            averages=dict(self.averages),
            evaluations=dict(self.evaluations),
            departures=self.departures.copy(),
            contributors=dict(self.contributors),
        )

    @property
    def stored(self) -> bool:
        """Whether the current version lies complete in the checkpoint store."""
        return self.sealed == self.version

    @property
    def checkpoint_version(self) -> int:
        """Version of the last complete checkpoint; the initial state is version 0."""
        return 0 if self.checkpoint is None else int(self.checkpoint["version"])
