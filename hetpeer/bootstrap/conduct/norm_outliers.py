"""Norms that scale everybody's update, and that nobody but one volunteer has found (docs/trust.md, "A norm of one holder's own"). Pure.

All blocks are clipped by the norm of all of them together. Where one volunteer alone holds a block, its word on that block's norm is nobody else's to compare: one that says something
huge makes the whole update nothing. So what is far from all that was usual is found by somebody else, if anybody comes; a second time it is taken as it is, for models do have such steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

from hetpeer.averaging import messages as m

FACTOR = 1e4
"""So many times as long as updates usually are, all blocks together: clipped by it the others' part is nothing."""
SHARED = 1e2
"""A block of several holders that is so many times as long as updates usually are says that it is the model's doing."""
RECENT = 100
"""Updates that are remembered."""
ENOUGH = 20
"""Before so many are known, nobody knows what is usual."""

Decision = Mapping[int, m.BlockVote]


class NormOutliers:
    """Of the updates of one reign, of all its clusters."""

    def __init__(self) -> None:
        self._known: deque[float] = deque(maxlen=RECENT)
        self._refused: set[tuple[int, int]] = set()
        """Batch and block."""

    def outliers(self, decision: Decision, alone: Iterable[int]) -> dict[int, float]:
        """Blocks that one holder has `alone`, and that it says are so long that nothing is left of the others → how many times as long as updates usually are."""
        usual = median(self._known) if len(self._known) >= ENOUGH else 0.0
        if not usual:
            return {}
        times = {block: math.sqrt(vote.squared_norm) / usual for block, vote in decision.items()}
        own = set(alone)
        if any(times[block] > SHARED for block in times.keys() - own):
            return {}
        return {block: times[block] for block in own & times.keys() if times[block] > FACTOR}

    def refuses(self, batch: int, block: int) -> bool:
        """Whether `block` of `batch` is to be computed by others first, if they come: once."""
        fresh = (batch, block) not in self._refused
        self._refused.add((batch, block))
        return fresh

    def committed(self, batch: int, norm: float, *, usual: bool) -> None:
        """An update of this `norm` is made, of `batch`."""
        self._refused = {where for where in self._refused if where[0] != batch}
        if usual:
            self._known.append(norm)
