"""Lineage of a grouped run's parameters: the trainings and averagings that led to them, from the log.

Independent of the coordinator's own tables (batches.py): the audit compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hetpeer.bootstrap.log.history import Decision, Record, decisions_of

State = tuple[int, int]
"""Cluster and version of some parameters."""


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
    made_by: dict[State, int] = {}
    """State → position in the log of the commit or averaging that made it."""
    heads: dict[int, State] = {}
    stored: State | None = None
    for place, record in enumerate(records):
        cluster = record.get("cluster", 0)
        match record["kind"]:
            case "founded":
                heads[cluster] = cluster, record["version"]
                parents[heads[cluster]] = [stored] if stored else []
            case "commit" | "average" | "installed":
                copies = [(other, version) for other, version in record.get("clusters", ())]
                for member, step in record.get("installed", [(cluster, record.get("step"))]):
                    heads[member] = member, step + 1
                    parents[heads[member]] = [(member, step), *copies]
                    made_by[heads[member]] = place
            case "checkpoint":
                stored = cluster, record["version"]
            case "dissolved":
                heads.pop(cluster, None)
            case _:
                pass
    ancestry = _ancestry(list(heads.values()) or [one for one in (stored,) if one], parents)
    places = {made_by[state] for state in ancestry if state in made_by}
    return Lineage(
        records=[records[place] for place in sorted(places)],
        decisions=[
            one
            for place in sorted(places)
            for one in decisions_of(records[place])
            if (one.cluster, one.step + 1) in ancestry
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
