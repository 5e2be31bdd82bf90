"""Outliers among contributions and among gradient norms (docs/trust.md, "What is built"). Pure.

A volunteer with a much longer gradient than others is always checked. Lengths come from the fingerprints that
reducers take in any case, or from the sum if it has one part; a reducer that overstates one costs an extra
check.

All blocks are clipped by their common norm. If one volunteer alone holds a block, nobody can compare its
norm, and a huge one would make the whole update vanish. So a norm far from the usual is computed again by
others, if there are any; the second time it is accepted, since models do have such steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

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


class SlotLength(NamedTuple):
    """Length of a slot per id, and per root of the ids' number; sums grow between them."""

    per_id: float
    per_root: float
    alone: bool = False
    """Whether it is the block's only one. Running statistics do not count then (`BlockVote.squared_norm`)."""


Lengths = Mapping[tuple[int, str], SlotLength]
"""(block, holder) → length of its slot."""


def lengths(votes: Mapping[str, m.Vote], covers: Iterable[m.Cover]) -> Lengths:
    """Lengths of the slots in `covers`, by `votes`; each reducer sees its share, and the median counts.

    Nobody adds up the only part of a block: its length is the sum's.
    """
    found: dict[tuple[int, str], SlotLength] = {}
    said = {
        peer: {(one.block, one.peer): one.squared for one in vote.lengths} for peer, vote in votes.items()
    }
    for cover in covers:
        total = sum(share for _, share in cover.reducers)
        for holder, ids in cover.slots:
            where = cover.block, holder
            seen = [said[r][where] * total / share for r, share in cover.reducers if where in said.get(r, {})]
            alone = not seen and len(cover.slots) == 1
            if alone:
                seen = [one.squared_norm for one in _own(votes, holder) if one.block == cover.block]
            if seen and ids:
                length = math.sqrt(median(seen))
                found[where] = SlotLength(length / len(ids), length / math.sqrt(len(ids)), alone)
    return found


def _own(votes: Mapping[str, m.Vote], holder: str) -> list[m.BlockVote]:
    return [] if holder not in votes else [one for one in votes[holder].blocks if one.finite]


class LengthOutliers:
    """Usual lengths of contributions in one term."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], tuple[deque[float], deque[float]]] = {}
        """(block, whether it had one slot) → lengths per id, and per root."""

    def unusual(self, seen: Lengths) -> set[str]:
        """Holders with a slot much longer than usual at its block, by both measures."""
        return {peer for (block, peer), own in seen.items() if self._is_unusual(block, own)}

    def _is_unusual(self, block: int, own: SlotLength) -> bool:
        known = self._known.get((block, own.alone))
        if known is None or len(known[0]) < ENOUGH:
            return False
        lengths = own.per_id, own.per_root
        return all(0.0 < FACTOR * median(usual) < one for usual, one in zip(known, lengths, strict=True))

    def committed(self, seen: Lengths) -> None:
        """Note a committed update's lengths; outliers that a check confirmed do not change what is usual."""
        for (block, _), own in seen.items():
            if not self._is_unusual(block, own):
                fresh: tuple[deque[float], deque[float]] = (deque(maxlen=RECENT), deque(maxlen=RECENT))
                per_id, per_root = self._known.setdefault((block, own.alone), fresh)
                per_id.append(own.per_id)
                per_root.append(own.per_root)


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
