"""Lineage of a grouped run's parameters: the trainings and averagings that led to them, from the log.

Independent of the coordinator's own tables (batches.py): the audit compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hetpeer.bootstrap.log.history import Decision, Record, decisions_of

State = tuple[int, int, int]
"""Cluster and version of some parameters, and the position in the log of what made them: a cluster that has
gone back has another state of the same version later.
"""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Records and decisions behind the parameters, in log order."""

    records: Sequence[Record]
    """Commits and averagings."""
    decisions: Sequence[Decision]
    """Decisions in the records, for clusters whose parameters survive."""

    @property
    def twice(self) -> frozenset[int]:
        """Batches that were trained twice and are in the result twice."""
        times = Counter(record["batch"] for record in self.records if record["kind"] == "commit")
        return frozenset(batch for batch, count in times.items() if count > 1)


def lineage(records: Sequence[Record]) -> Lineage:
    """Lineage of the clusters that live at the end of the log, or of the last checkpoint if none does."""
    parents: dict[State, list[State]] = {}
    made: set[State] = set()
    """States that a commit or an averaging made; founding makes the others."""
    now: dict[tuple[int, int], State] = {}
    """Cluster and version → its last state of that version."""
    copies: dict[int, list[State]] = {}
    """Group → what was averaged."""
    heads: dict[int, State] = {}
    stored: State | None = None

    def at(cluster: int, version: int) -> State:
        return now.get((cluster, version), (cluster, version, -1))

    for place, record in enumerate(records):
        cluster = record.get("cluster", 0)
        match record["kind"]:
            case "founded":
                first = cluster, record["version"], place
                heads[cluster] = now[cluster, record["version"]] = first
                parents[first] = [stored] if stored else []
            case "commit" | "average" | "installed":
                if record["kind"] == "average":
                    copies[record["group"]] = [at(other, version) for other, version in record["clusters"]]
                mean = copies.get(record["group"], []) if record["kind"] != "commit" else []
                for member, step in record.get("installed", [(cluster, record.get("step"))]):
                    heads[member] = state = member, step + 1, place
                    parents[state] = [at(member, step), *mean]
                    now[member, step + 1] = state
                    made.add(state)
            case "checkpoint":
                stored = at(cluster, record["version"])
            case "rollback":
                heads[cluster] = at(cluster, record["to_version"])
            case "dissolved":
                heads.pop(cluster, None)
            case _:
                pass
    ancestry = _ancestry(list(heads.values()) or [one for one in (stored,) if one], parents)
    places = {place for _, _, place in ancestry & made}
    return Lineage(
        records=[records[place] for place in sorted(places)],
        decisions=[
            one
            for place in sorted(places)
            for one in decisions_of(records[place])
            if (one.cluster, one.step + 1, place) in ancestry
        ],
    )


def _ancestry(heads: Sequence[State], parents: dict[State, list[State]]) -> set[State]:
    found: set[State] = set()
    ahead = list(heads)
    while ahead:
        state = ahead.pop()
        if state not in found:
            found.add(state)
            ahead += parents.get(state, ())
    return found
