"""Unused work of a step, by peer: microbatches that were late, or lost and computed again.

Pure. The coordinator writes it into the step's commit record; `hetpeer audit` lists it beside the used work.
Docs: asynchronous.md, "Every contribution".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Entries = list[tuple[str, list[int]]]
"""(peer, ids of the step in rising order), sorted by peer."""
AFTERWARDS = 4
"""Number of committed steps for which late reports are accepted: volunteers hear of a commit later."""


@dataclass(slots=True)
class Unused:
    """Unused work of one step. An id may occur for several peers."""

    _late: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    _lost: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def late(self, peer: str, ids: Iterable[int]) -> None:
        """Note `ids` that `peer` computed although another slot with them counts at some block."""
        self._late[peer].update(ids)

    def lost(self, peer: str, ids: Iterable[int]) -> None:
        """Note `ids` that are open again: `peer` had computed them at some block, or was to when it left."""
        self._lost[peer].update(ids)

    def written(self) -> dict[str, Entries]:
        """The form of log records."""
        return {"late": entries(self._late), "lost": entries(self._lost)}


class LateWork:
    """Reports for steps that are committed already; the next commit record includes them."""

    def __init__(self) -> None:
        self._over: dict[int, tuple[frozenset[str], frozenset[int]]] = {}
        """Step → its final roster and ids; other reports are ignored."""
        self._late: defaultdict[int, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))

    def committed(self, step: int, roster: Iterable[str], ids: frozenset[int]) -> None:
        """Accept late reports of `ids` of `step` from `roster`, until AFTERWARDS more steps are committed."""
        self._over[step] = frozenset(roster), ids
        if len(self._over) > AFTERWARDS:
            del self._over[min(self._over)]

    def late(self, step: int, peer: str, ids: Iterable[int]) -> None:
        """Note that `peer` reports `ids` of `step`, which is no longer in progress."""
        roster, known = self._over.get(step, (frozenset(), frozenset()))
        if peer in roster and (found := known.intersection(ids)):
            self._late[step][peer] |= found

    def take(self) -> list[tuple[int, Entries]]:
        """(step, late work) noted since the last call."""
        found = [(step, entries(late)) for step, late in sorted(self._late.items())]
        self._late.clear()
        return found


def entries(ids: Mapping[str, Iterable[int]]) -> Entries:
    """`ids` in a fixed order."""
    return [(peer, sorted(theirs)) for peer, theirs in sorted(ids.items()) if theirs]


def read(written: Any) -> Iterator[tuple[str, int]]:
    """(peer, id) for each id of `Entries`."""
    found: Sequence[tuple[str, Sequence[int]]] = written
    return ((peer, microbatch) for peer, ids in found for microbatch in ids)
