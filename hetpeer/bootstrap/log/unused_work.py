"""What of a step's work is in no sum, and whose it was: it came too late, or it was lost and is done again under the same id.

Pure. The coordinator's books, written into the step's commit record: what `hetpeer audit` lists beside what was used. Docs: asynchronous.md, "Every contribution".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Entries = list[tuple[str, list[int]]]
"""Peers, each with ids of the step in rising order."""
AFTERWARDS = 4
"""Of so many committed steps somebody may still report something: until it hears of the commit."""


class Unused:
    """Of one step. An id may be in it several times, by different peers, or by one at different blocks."""

    def __init__(self) -> None:
        self._late: defaultdict[str, set[int]] = defaultdict(set)
        self._lost: defaultdict[str, set[int]] = defaultdict(set)

    def late(self, peer: str, ids: Iterable[int]) -> None:
        """`peer` has computed what counts by somebody else at some block, or by itself in another slot."""
        self._late[peer].update(ids)

    def lost(self, peer: str, ids: Iterable[int]) -> None:
        """What `peer` had computed at some block, or was to compute when it left, is open again."""
        self._lost[peer].update(ids)

    def written(self) -> dict[str, Entries]:
        """As log records have it."""
        return {"late": entries(self._late), "lost": entries(self._lost)}


class LateWork:
    """What is reported of steps that are committed already: the next commit record says so."""

    def __init__(self) -> None:
        self._over: dict[int, tuple[frozenset[str], frozenset[int]]] = {}
        """Step → who took part in it until the end, and its ids: of nobody and nothing else it is written down."""
        self._late: defaultdict[int, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))

    def committed(self, step: int, roster: Iterable[str], ids: frozenset[int]) -> None:
        self._over[step] = frozenset(roster), ids
        if len(self._over) > AFTERWARDS:
            del self._over[min(self._over)]

    def late(self, step: int, peer: str, ids: Iterable[int]) -> None:
        """`peer` reports `ids` of `step`, which is not under way."""
        roster, known = self._over.get(step, (frozenset(), frozenset()))
        if peer in roster and (found := known.intersection(ids)):
            self._late[step][peer] |= found

    def take(self) -> list[tuple[int, Entries]]:
        """Step by step what has come since this was last asked."""
        found = [(step, entries(late)) for step, late in sorted(self._late.items())]
        self._late.clear()
        return found


def entries(ids: Mapping[str, Iterable[int]]) -> Entries:
    """In a fixed order."""
    return [(peer, sorted(theirs)) for peer, theirs in sorted(ids.items()) if theirs]


def read(written: Any) -> Iterator[tuple[str, int]]:
    """Peer and id of `Entries`, one after the other."""
    found: Sequence[tuple[str, Sequence[int]]] = written
    return ((peer, microbatch) for peer, ids in found for microbatch in ids)
