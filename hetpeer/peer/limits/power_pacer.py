"""How much of its time a worker may work, so that no GPU draws more than its owner allows: watts in, a share out. Pure.

A card's own limit is root's to set. Ours is kept by resting: between two commands of the worker a card draws next to nothing.
"""

from __future__ import annotations

import math

LEAST = 0.1
"""Of its time; who works less is of no use to a swarm, and is held back instead."""
AIM = 0.97
"""Of the limit: what is measured is some seconds old."""
FALL, RISE = 0.5, 1.1
"""At most, from one look to the next."""
HELPLESS_S = 30.0
"""A card that draws too much for so long although the worker nearly rests: somebody else has it do so, or the limit is below what it takes."""


class Pacer:
    """From one look to the next, some seconds later. `share`: how much of its time the worker may work, LEAST to 1."""

    share = 1.0
    _helpless_since = math.inf

    def look(self, now: float, watts: float | None, limit: float, *, held: bool) -> bool:
        """Whether slowness does not help. `watts`: of the card that draws most, since the last look; None: unknown, and nothing changes.
        `limit` 0: none. `held`: for power, so that what is drawn is not ours to judge by.
        """
        if not limit:
            self.share, self._helpless_since = 1.0, math.inf
            return False
        if watts is not None:
            wanted = self.share * AIM * limit / max(watts, 1.0)
            highest = self.share if held else min(1.0, self.share * RISE)
            self.share = max(LEAST, self.share * FALL, min(wanted, highest))
            over = self.share == LEAST and watts > limit
            self._helpless_since = min(self._helpless_since, now) if over else math.inf
        return now - self._helpless_since >= HELPLESS_S
