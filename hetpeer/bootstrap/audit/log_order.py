"""Order of a run's log: steps in sequence, by the term in force, and nothing applied that was not decided.
Pure.

Yields each breach with the rule of the audit (audit.py) that it breaks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from hetpeer.bootstrap.log.evidence import Key
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.logged_decision import decisions_of

Breach = tuple[str, str]
"""(description, rule that it breaks)."""


def out_of_order(records: Iterable[Record]) -> Iterator[Breach]:
    """F6 and I5: only a roll-back goes back, and only to a checkpoint."""
    stored = term = view = 0
    versions: Counter[int] = Counter()
    """Cluster → version."""
    for record in records:
        cluster = record.get("cluster", 0)
        match record["kind"]:
            case "reign":
                if record["term"] <= term:
                    yield f"term {record['term']} began after term {term}", "F6"
                term = record["term"]
            case "rollback":
                if record["to_version"] not in (stored, versions[cluster]):
                    went = f"the run went back to version {record['to_version']}"
                    yield f"{went}, and the last complete checkpoint was {stored}", "I5"
                if record["view"] <= view:
                    yield f"view {record['view']} began after view {view}", "F6"
                versions[cluster], view = record["to_version"], record["view"]
            case "founded":
                if record["version"] != stored:
                    began = f"cluster {cluster} began at version {record['version']}"
                    yield f"{began}, and the last complete checkpoint was {stored}", "I5"
                versions[cluster] = record["version"]
            case "commit":
                yield from _in_turn(cluster, record["step"], versions)
                if (record["term"], record["view"]) != (term, view):
                    decided = (
                        f"step {record['step']} was decided in term {record['term']}, view {record['view']}"
                    )
                    yield f"{decided}, while term {term}, view {view} was in force", "F6"
            case "average" | "installed":
                for member, step in record["installed"]:
                    yield from _in_turn(member, step, versions)
            case "checkpoint":
                stored = record["version"]


def _in_turn(cluster: int, step: int, versions: Counter[int]) -> Iterator[Breach]:
    due = versions[cluster]
    if step != due:
        whose = f" of cluster {cluster}" if cluster else ""
        yield f"step {step}{whose} was committed when step {due} was due", "F6"
    versions[cluster] = step + 1


def undecided(records: Iterable[Record], applied: Iterable[Key]) -> Iterator[Breach]:
    """I3: nobody applied an update that was never committed, not even in a history that was rolled back
    later.
    """
    decided = {one.key for record in records for one in decisions_of(record)}
    for *key, block in applied:
        if tuple(key) not in decided:
            _, view, step, plan = key
            yield f"step {step} block {block}: view {view} plan {plan} was applied and never committed", "I3"
