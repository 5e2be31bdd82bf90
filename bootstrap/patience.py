"""How long the coordinator waits before it does something about it. Pure."""

from __future__ import annotations

import math

MAX_FACTOR = 64.0
DECAY = 0.8
HEDGED = 0.05
"""The last ids of a step, as a share of all, that are handed out a second time when they take too long."""
LULL_S = 1.0
LONGER = 2.0


class Pace:
    """How patient to be: a time-out that proves too short for this swarm doubles, and shrinks slowly with each commit."""

    def __init__(self) -> None:
        self._factor = 1.0

    def patience(self, seconds: float) -> float:
        """`seconds`, as often as it takes here."""
        return seconds * self._factor

    def ran_out(self) -> None:
        """Something took longer than our patience."""
        self._factor = min(2 * self._factor, MAX_FACTOR)

    def committed(self) -> None:
        """A step was committed."""
        self._factor = max(1.0, DECAY * self._factor)


class Lull:
    """When something was last counted in a step, which began at `now`, and how long it took at most until something was."""

    def __init__(self, now: float) -> None:
        self.since = now
        self._longest = math.inf
        """Until something has been counted twice, nobody knows how long it takes: the first comes when the pipeline is full."""
        self._counted = False
        self._urged = False

    def over(self, now: float) -> None:
        """Something was counted, or handed out."""
        lull = now - self.since
        if self._counted:
            self._longest = lull if math.isinf(self._longest) else max(self._longest, lull)
        self.since, self._counted, self._urged = now, True, False

    def urges(self, now: float) -> bool:
        """Whether this one is so long that everybody is to say what they have; true once in a lull."""
        if self._urged or not self.is_unusual(now):
            return False
        self._urged = True
        return True

    def is_unusual(self, now: float) -> bool:
        """Whether it is longer than any before: what is left may be at somebody slow (Dean and Barroso, The tail at scale)."""
        return now - self.since > max(LULL_S, LONGER * self._longest)


def few(microbatches: int) -> int:
    """So many undone ids are the last of a step."""
    return max(1, int(HEDGED * microbatches))
