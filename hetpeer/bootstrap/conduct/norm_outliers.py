"""Outliers among gradient norms stated by a block's only holder (docs/trust.md). Pure.

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

FACTOR = 1e4
"""Norm of one block, relative to the usual norm of a whole update, above which it is an outlier."""
SHARED = 1e2
"""Relative norm of a block with several holders above which the model is taken to be the cause."""
RECENT = 100
"""Number of updates that are remembered."""
ENOUGH = 20
"""Number of updates before which nothing counts as an outlier."""

Decision = Mapping[int, m.BlockVote]


class NormOutliers:
    """Norm outliers of one term, over all clusters."""

    def __init__(self) -> None:
        self._known: deque[float] = deque(maxlen=RECENT)
        self._refused: set[tuple[int, int]] = set()
        """(batch, block) that was refused once."""

    def outliers(self, decision: Decision, alone: Iterable[int]) -> dict[int, float]:
        """Outliers among the blocks with a single holder (`alone`) → norm relative to the usual norm of an
        update.
        """
        usual = median(self._known) if len(self._known) >= ENOUGH else 0.0
        if not usual:
            return {}
        times = {block: math.sqrt(vote.squared_norm) / usual for block, vote in decision.items()}
        own = set(alone)
        if any(times[block] > SHARED for block in times.keys() - own):
            return {}
        return {block: times[block] for block in own & times.keys() if times[block] > FACTOR}

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
