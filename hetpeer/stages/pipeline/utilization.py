"""Utilization of a holder's worker: computing, or waiting for what. Pure; times are given."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

RECENT_S = 60.0
"""Time constant of recent shares: seconds after which a moment's weight has fallen to 1/e."""


class WorkerOccupation(enum.Enum):
    """Occupation of a worker at one time."""

    COMPUTES = "computes"
    ROOM = "room"
    """Work is ready, but there is no room for its result: in a slot, in memory, or at the next peer."""
    DATA = "data"
    """The next input is computed elsewhere, or on its way."""
    STEP = "step"
    """All work that has begun is done: a reduce, a vote, a commit or another peer is waited for."""


class OccupationShares:
    """How the worker's time is divided, in all and recently."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(WorkerOccupation, 0.0)
        """Seconds since the first `note`."""
        self._lately = dict.fromkeys(WorkerOccupation, 0.0)
        self._now: WorkerOccupation | None = None
        self._since = 0.0

    def note(self, occupation: WorkerOccupation, now: float) -> tuple[WorkerOccupation, float] | None:
        """From `now` on it does this. Returns (occupation, since when) of the time before, if that was
        another one.
        """
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

    def lately(self, now: float) -> Mapping[WorkerOccupation, float]:
        """Shares of about the last minute, which add up to 1; all 0 before the first `note`."""
        self._count(now)
        self._since = max(self._since, now)
        total = sum(self._lately.values())
        return {one: share / total for one, share in self._lately.items()} if total else dict(self._lately)
