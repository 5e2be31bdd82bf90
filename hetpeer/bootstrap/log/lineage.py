"""What the parameters of a grouped run are made of: which trainings and averagings led to them, as the log tells it.

Not the coordinator's books (batches.py) but a second way to the same answer, for those who check it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.logged_decision import Decision, decisions_of

State = tuple[int, int]
"""Cluster and version: parameters that there were."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """In the order of the log."""

    records: Sequence[Record]
    """Commits and averagings."""
    decisions: Sequence[Decision]
    """What was decided in them for clusters whose parameters went on."""

    @property
    def twice(self) -> frozenset[int]:
        """Batches that are in by two trainings."""
        times = Counter(record["batch"] for record in self.records if record["kind"] == "commit")
        return frozenset(batch for batch, count in times.items() if count > 1)


def lineage(records: Sequence[Record]) -> Lineage:
    """Of the clusters that live at the end of the log; if none does, of the last checkpoint."""
    parents: dict[State, list[State]] = {}
    made_by: dict[State, int] = {}
    """State → the place in the log of the commit or averaging that made it."""
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
