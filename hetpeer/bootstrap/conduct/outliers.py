"""Outliers among contributions and among gradient norms (docs/trust.md, "What is built"). Pure.

A volunteer with a much longer gradient than others is always checked. Lengths come from the fingerprints that
reducers take in any case; a reducer that overstates one costs an extra check.

All blocks are clipped by their common norm. If one volunteer alone holds a block, nobody can compare its
norm, and a huge one would make the whole update vanish. So a norm far from the usual is computed again by
others, if there are any; the second time it is accepted, since models do have such steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

from hetpeer.averaging import messages as m

FACTOR = 10.0
"""Length relative to the median above which a contribution is an outlier."""
RECENT = 100
"""Number of contributions to a block, and of updates, that are remembered."""
ENOUGH = 20
"""Number of contributions, or of updates, before which nothing counts as an outlier."""
NORM_FACTOR = 1e4
"""Norm of one block, relative to the usual norm of a whole update, above which it is an outlier."""
SHARED = 1e2
"""Relative norm of a block with several holders above which the model is taken to be the cause."""

Decision = Mapping[int, m.BlockVote]
Lengths = Mapping[tuple[int, str], tuple[float, float]]
"""(block, holder) → length of its slot per id, and per root of the ids' number; sums grow between them."""


def lengths(votes: Mapping[str, m.Vote], covers: Iterable[m.Cover]) -> Lengths:
    """Lengths of the slots in `covers`, by `votes`; each reducer sees its share, and the median counts."""
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
    """Usual lengths of contributions in one term."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[deque[float], deque[float]]] = {}

    def unusual(self, seen: Lengths) -> set[str]:
        """Holders with a slot much longer than usual at its block, by both measures."""
        return {peer for (block, peer), own in seen.items() if self._is_unusual(block, own)}

    def _is_unusual(self, block: int, own: tuple[float, float]) -> bool:
        known = self._known.get(block)
        if known is None or len(known[0]) < ENOUGH:
            return False
        return all(0.0 < FACTOR * median(usual) < length for usual, length in zip(known, own, strict=True))

    def committed(self, seen: Lengths) -> None:
        """Note a committed update's lengths; outliers that a check confirmed do not change what is usual."""
        for (block, _), own in seen.items():
            if not self._is_unusual(block, own):
                known = self._known.setdefault(block, (deque(maxlen=RECENT), deque(maxlen=RECENT)))
                for usual, length in zip(known, own, strict=True):
                    usual.append(length)


class NormOutliers:
    """Norm outliers of one term, over all clusters."""

    def __init__(self) -> None:
        self._known: deque[float] = deque(maxlen=RECENT)
        self._refused: set[tuple[int, int]] = set()
        """(batch, block) that was refused once."""

    def outliers(self, decision: Decision, alone: Iterable[int]) -> dict[int, float]:
        """Outliers among blocks with a single holder (`alone`) → norm relative to an update's usual norm."""
        usual = median(self._known) if len(self._known) >= ENOUGH else 0.0
        if not usual:
            return {}
        times = {block: math.sqrt(vote.squared_norm) / usual for block, vote in decision.items()}
        own = set(alone)
        if any(times[block] > SHARED for block in times.keys() - own):
            return {}
        return {block: times[block] for block in own & times.keys() if times[block] > NORM_FACTOR}

    def refuses(self, batch: int, block: int) -> bool:
        """Whether others should compute `block` of `batch` first, if there are any; true only once."""
        fresh = (batch, block) not in self._refused
        self._refused.add((batch, block))
        return fresh

    def committed(self, batch: int, norm: float, *, usual: bool) -> None:
        """Note a committed update with `norm`, of `batch`."""
        self._refused = {where for where in self._refused if where[0] != batch}
        if usual:
            self._known.append(norm)
