"""Contributions that are much longer than others: whoever counts one is checked, whatever was drawn (docs/trust.md, "A guard"). Pure.

How long they are, their reducers say, by the fingerprints that they take of everything in any case. One that says too much costs somebody a check.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from hetpeer.averaging import messages as m

FACTOR = 10.0
"""Times as long as the middle one."""
RECENT = 100
"""Contributions to a block that are remembered."""
ENOUGH = 20
"""Before so many are known, nobody knows what is long."""

Lengths = Mapping[tuple[int, str], float]
"""Block and holder → length of what it counts there, for each id."""


def lengths(votes: Iterable[m.Vote], covers: Mapping[int, Sequence[tuple[str, Sequence[int]]]]) -> Lengths:
    """Of what `covers` (block → whose sums of which ids) names, as all reducers together say in their `votes`."""
    squared: Counter[tuple[int, str]] = Counter()
    for vote in votes:
        for one in vote.lengths:
            squared[one.block, one.peer] += one.squared  # type: ignore[assignment]  # a Counter adds up anything
    ids = {(block, peer): len(own) for block, sums in covers.items() for peer, own in sums}
    return {
        where: math.sqrt(squared[where]) / count for where, count in ids.items() if count and where in squared
    }


class Guard:
    """What is usual, in one reign."""

    def __init__(self) -> None:
        self._known: dict[int, deque[float]] = {}

    def unusual(self, seen: Lengths) -> set[str]:
        """Who counts something that is much longer than what others have counted there."""
        return {
            peer
            for (block, peer), length in seen.items()
            if len(known := self._known.get(block, ())) >= ENOUGH and length > FACTOR * median(known)
        }

    def committed(self, seen: Lengths) -> None:
        """These are in an update."""
        for (block, _), length in seen.items():
            self._known.setdefault(block, deque(maxlen=RECENT)).append(length)
