"""Checks of a run's log for the audit (audit.py): order, the volunteers' statements, and credit. Pure.

Order: steps in sequence, by the term in force, and nothing applied that was not decided. Statements: the
majority counts for each update of a block; others are named. Nobody can tell whether a single line is true,
and a volunteer may sign one on a block that it does not hold. One statement against several says nothing
about the run. Credit in commits equals the work in the volunteers' signed logs (docs/credit.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetpeer.bootstrap.log.credit import Contributors, work_in
from hetpeer.bootstrap.log.evidence import AppliedEvent, Key
from hetpeer.bootstrap.log.history import Decision, Record, decisions_of

Breach = tuple[str, str]
"""(description, rule that it breaks)."""


def out_of_order(records: Iterable[Record]) -> Iterator[Breach]:
    """F6 and I5: only a roll-back goes back, and only to a checkpoint."""
    stored = term = 0
    savers = {0}
    """Clusters that have the last checkpoint in their history."""
    versions: Counter[int] = Counter()
    """Cluster → version."""
    views: Counter[int] = Counter()
    """Cluster → view."""
    for record in records:
        cluster = record.get("cluster", 0)
        match record["kind"]:
            case "reign":
                if record["term"] <= term:
                    yield f"term {record['term']} began after term {term}", "F6"
                term = record["term"]
            case "rollback":
                own = {stored, versions[cluster]} if cluster in savers else {versions[cluster]}
                if record["to_version"] not in own:
                    went = f"the run went back to version {record['to_version']}"
                    yield f"{went}, and the last complete checkpoint was {stored}", "I5"
                if record["view"] <= views[cluster]:
                    yield f"view {record['view']} began after view {views[cluster]}", "F6"
                versions[cluster], views[cluster] = record["to_version"], record["view"]
            case "founded":
                if record["version"] != stored:
                    began = f"cluster {cluster} began at version {record['version']}"
                    yield f"{began}, and the last complete checkpoint was {stored}", "I5"
                versions[cluster] = record["version"]
                savers.add(cluster)
            case "commit":
                yield from _in_turn(cluster, record["step"], versions)
                if (record["term"], record["view"]) != (term, view := views[cluster]):
                    decided = (
                        f"step {record['step']} was decided in term {record['term']}, view {record['view']}"
                    )
                    yield f"{decided}, while term {term}, view {view} was in force", "F6"
            case "average" | "installed":
                for member, step in record["installed"]:
                    yield from _in_turn(member, step, versions)
            case "checkpoint":
                stored, savers = record["version"], {cluster}


def _in_turn(cluster: int, step: int, versions: Counter[int]) -> Iterator[Breach]:
    due = versions[cluster]
    if step != due:
        whose = f" of cluster {cluster}" if cluster else ""
        yield f"step {step}{whose} was committed when step {due} was due", "F6"
    versions[cluster] = step + 1


def undecided(records: Iterable[Record], applied: Iterable[Key]) -> Iterator[Breach]:
    """I3: nobody applied an update that was never committed, not even in a history rolled back later."""
    decided = {one.key for record in records for one in decisions_of(record)}
    for *key, block in applied:
        if tuple(key) not in decided:
            _, view, step, plan = key
            yield f"step {step} block {block}: view {view} plan {plan} was applied and never committed", "I3"


@dataclass(slots=True)
class MajorityStatements:
    """Volunteers' statements on updates, compared with each other."""

    applied: dict[Key, list[AppliedEvent]] = field(default_factory=dict)
    """Statements of the majority; all statements if there is no majority."""
    torn: dict[Key, list[str]] = field(default_factory=dict)
    """Update without a majority → volunteers with a statement on it."""
    outvoted: dict[str, list[AppliedEvent]] = field(default_factory=dict)
    """Volunteer → its statements against the majority."""

    @classmethod
    def of(cls, applied: Mapping[Key, Sequence[AppliedEvent]]) -> MajorityStatements:
        """Compare statements. Each volunteer has one vote per update, none if it contradicts itself."""
        heard = cls()
        for key, events in applied.items():
            heard.applied[key] = list(events)
            says = [event.says for event in events]
            if says.count(says[0]) == len(says):
                continue
            words = {
                event.peer: {other.says for other in events if other.peer == event.peer} for event in events
            }
            voices = Counter(word for own in words.values() if len(own) == 1 for word in own)
            most, times = max(voices.items(), key=lambda one: one[1], default=(None, 0))
            if 2 * times <= len(words):
                heard.torn[key] = sorted(words)
                continue
            heard.applied[key] = [event for event in events if words[event.peer] == {most}]
            for event in events:
                if event.says != most:
                    heard.outvoted.setdefault(event.peer, []).append(event)
        return heard

    def findings(self, decided: Collection[tuple[int, int, int, int]]) -> Iterator[str]:
        """A line per outvoted volunteer, and per volunteer with statements on updates not in `decided`."""
        for peer, events in sorted(self.outvoted.items()):
            yield f"{peer} has signed something else than most who applied the same: {_where(events)}"
        undecided: dict[str, list[AppliedEvent]] = {}
        for event in (event for events in self.applied.values() for event in events):
            if event.key[:4] not in decided:
                undecided.setdefault(event.peer, []).append(event)
        for peer, events in sorted(undecided.items()):
            yield f"{peer} has signed what was never committed: {_where(events)}"


def _where(events: Sequence[AppliedEvent]) -> str:
    first = events[0]
    cluster = f" of cluster {first.cluster}" if first.cluster else ""
    where = f"step {first.step}{cluster} block {first.block}"
    return f"{len(events)} updates, first of {where}" if len(events) > 1 else where


def check_credit(
    surviving: Iterable[Decision],
    records: Iterable[Record],
    applied: Mapping[Key, Sequence[AppliedEvent]],
    sizes: Mapping[int, int],
    blocks: int,
) -> tuple[Counter[str], list[str]]:
    """Peer → credit, and a line for each difference from the applied work; `sizes`: id → samples.

    Steps with a block without evidence, or with contradicting holders, are problems of their own: left out.
    """
    contributors = Contributors()
    for record in records:
        contributors.add(record)
    credit: Counter[str] = Counter()
    problems: list[str] = []
    for one in surviving:
        if one.counted is None:
            continue
        given = Counter(dict(contributors.read(one.counted)))
        credit += given
        said = [applied.get((*one.key, block), ()) for block in range(blocks)]
        work = work_in((events[0].cover for events in said if events), sizes)
        known = all(events and len({event.counts for event in events}) == 1 for events in said)
        wrong = [peer for peer in sorted(work.keys() | given.keys()) if known and work[peer] != given[peer]]
        problems += [f"{one}: {peer} is credited {given[peer]}, and has {work[peer]}" for peer in wrong]
    return credit, problems
