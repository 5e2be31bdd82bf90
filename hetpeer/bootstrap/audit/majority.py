"""Majority of the volunteers' statements on each update of a block; others are named. Docs: credit.md. Pure.

Nobody can tell whether a single line is true, and a volunteer may sign one on a block that it does not hold.
One statement against several says nothing about the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetpeer.bootstrap.log.evidence import AppliedEvent, Key


@dataclass(slots=True)
class MajorityStatements:
    """Statements after comparison."""

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
        """A line for each outvoted volunteer, and for each with statements on updates that are not
        `decided`.
        """
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
