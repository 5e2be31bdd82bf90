"""Where volunteers say different things of one update of a block: what most of them say counts, and who says something else is named. Docs: credit.md. Pure.

Nobody can tell whether a line is true, and a volunteer may sign one on a block that it does not hold. One against several is its own doing, and says nothing of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetpeer.bootstrap.log.evidence import AppliedEvent, Key


@dataclass(slots=True)
class MajorityStatements:
    """What is left of what was said, when it is compared."""

    applied: dict[Key, list[AppliedEvent]] = field(default_factory=dict)
    """What most say; everything where nothing is what most say."""
    torn: dict[Key, list[str]] = field(default_factory=dict)
    """Where nothing is → who speaks of it."""
    outvoted: dict[str, list[AppliedEvent]] = field(default_factory=dict)
    """Who has said something else than most → what."""

    @classmethod
    def of(cls, applied: Mapping[Key, Sequence[AppliedEvent]]) -> MajorityStatements:
        """Each volunteer has one voice; none who says two things of the same."""
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
        """A line for each who was outvoted, and for each who speaks of what is not among the updates `decided`."""
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
