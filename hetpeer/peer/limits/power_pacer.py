"""Share of its time that a worker may work under a power limit of the GPU: watts in, a share out. Pure.

Only root can set a card's own limit. Ours is kept by resting between the worker's commands, when a card draws
little.
"""

from __future__ import annotations

import math

LEAST = 0.1
"""Least share; a volunteer that works less is of no use to a swarm, and is held back instead."""
AIM = 0.97
"""Margin as a share of the limit: readings are some seconds old."""
FALL, RISE = 0.5, 1.1
"""At most, from one look to the next."""
HELPLESS_S = 30.0
"""Seconds of too much power at the least share before throttling counts as useless: another program uses the
card, or the limit is below its idle power.
"""


class Pacer:
    """Adjusts `share`, from LEAST to 1, at each look, some seconds apart."""

    share = 1.0
    _helpless_since = math.inf

    def look(self, now: float, watts: float | None, limit: float, *, held: bool) -> bool:
        """Adjust the share; returns whether throttling does not help.

        `watts`: mean of the card that draws most; None: unknown, nothing changes. `limit` 0: no limit.
        `held`: the volunteer is held for power, so the watts are not its own.
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
