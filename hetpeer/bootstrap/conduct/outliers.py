"""Contributions that are much longer than others: whoever counts one is checked, whatever was drawn (docs/trust.md, "A guard"). Pure.

How long they are, their reducers say, by the fingerprints that they take of everything in any case. One that says too much costs somebody a check.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

from hetpeer.averaging import messages as m

FACTOR = 10.0
"""Times as long as the middle one."""
RECENT = 100
"""Contributions to a block that are remembered."""
ENOUGH = 20
"""Before so many are known, nobody knows what is long."""

Lengths = Mapping[tuple[int, str], tuple[float, float]]
"""Block and holder → length of what it counts there, for each id, and for the root of their number: sums grow by something between the two."""


def lengths(votes: Mapping[str, m.Vote], covers: Iterable[m.Cover]) -> Lengths:
    """Of what `covers` name, as their reducers say in their `votes`: each knows its share of it, and the middle one counts."""
    found: dict[tuple[int, str], tuple[float, float]] = {}
    said = {
        peer: {(one.block, one.peer): one.squared for one in vote.lengths} for peer, vote in votes.items()
    }
    for cover in covers:
        total = sum(share for _, share in cover.reducers)
        for holder, ids in cover.slots:
            where = cover.block, holder
            seen = [said[r][where] * total / share for r, share in cover.reducers if where in said.get(r, {})]
            if seen and ids:
                length = math.sqrt(median(seen))
                found[where] = length / len(ids), length / math.sqrt(len(ids))
    return found


class LengthOutliers:
    """What is usual, in one reign."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[deque[float], deque[float]]] = {}

    def unusual(self, seen: Lengths) -> set[str]:
        """Who counts something that is much longer than what others have counted there, however that is measured."""
        return {peer for (block, peer), own in seen.items() if self._is_unusual(block, own)}

    def _is_unusual(self, block: int, own: tuple[float, float]) -> bool:
        known = self._known.get(block)
        if known is None or len(known[0]) < ENOUGH:
            return False
        return all(0.0 < FACTOR * median(usual) < length for usual, length in zip(known, own, strict=True))

    def committed(self, seen: Lengths) -> None:
        """These are in an update. What is unusual, and was found to be right, does not become usual."""
        for (block, _), own in seen.items():
            if not self._is_unusual(block, own):
                known = self._known.setdefault(block, (deque(maxlen=RECENT), deque(maxlen=RECENT)))
                for usual, length in zip(known, own, strict=True):
                    usual.append(length)
