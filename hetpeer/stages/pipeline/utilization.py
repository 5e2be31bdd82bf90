"""What a holder's worker does, and what it waits for when it does nothing. Pure; times are given."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

RECENT_S = 60.0
"""What was so long ago counts a third of what is now."""


class Occupation(enum.Enum):
    """Of a worker, at a time."""

    COMPUTES = "computes"
    ROOM = "room"
    """Work is ready, and there is no room for what comes of it: in a slot, in memory, or at the next peer."""
    DATA = "data"
    """What comes next is computed elsewhere, or on its way."""
    STEP = "step"
    """All is done that has begun: a sum, a vote, a commit, or somebody else is waited for."""


class Shares:
    """How its time is divided: all of it since the beginning, and lately."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(Occupation, 0.0)
        """Since the first word."""
        self._lately = dict.fromkeys(Occupation, 0.0)
        self._now: Occupation | None = None
        self._since = 0.0

    def note(self, occupation: Occupation, now: float) -> tuple[Occupation, float] | None:
        """From `now` on it does this. Returns what it did until now and since when, if that was something else."""
        before, since = self._now, self._since
        if occupation is before:
            return None
        self._count(now)
        self._now, self._since = occupation, now
        return None if before is None else (before, since)

    def _count(self, now: float) -> None:
        if self._now is None:
            return
        passed = max(now - self._since, 0.0)
        self.seconds[self._now] += passed
        kept = math.exp(-passed / RECENT_S)
        self._lately = {one: kept * share for one, share in self._lately.items()}
        self._lately[self._now] += 1.0 - kept

    def lately(self, now: float) -> Mapping[Occupation, float]:
        """Shares of the last minute or so, which are 1 together; all are 0 before anything was said."""
        self._count(now)
        self._since = max(self._since, now)
        total = sum(self._lately.values())
        return {one: share / total for one, share in self._lately.items()} if total else dict(self._lately)
