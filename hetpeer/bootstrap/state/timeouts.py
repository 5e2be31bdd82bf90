"""How long the coordinator waits before it does something about it. Pure."""

from __future__ import annotations

import math

MAX_FACTOR = 64.0
DECAY = 0.8
SPARE = 1.5
"""So many times what was waited for is what is needed next time."""
HEDGED = 0.05
"""The last ids of a step, as a share of all, that are handed out a second time when they take too long."""
LULL_S = 1.0
LONGER = 2.0


class AdaptiveTimeouts:
    """How patient to be: a time-out that proves too short for this swarm doubles, and shrinks slowly with each commit."""

    def __init__(self) -> None:
        self._factor = 1.0
        self._before: float | None = None
        """What it was before anything ran out since the last commit."""
        self._blamed = False
        self._needed = 0.0
        """What would have been enough since the last commit, if nothing that is waited for takes longer."""

    def scaled(self, seconds: float) -> float:
        """`seconds`, as often as it takes here."""
        return seconds * self._factor

    def ran_out(self) -> None:
        """Something took longer than our patience."""
        if self._before is None:
            self._before = self._factor
        self._factor = min(2 * self._factor, MAX_FACTOR)

    def blamed(self) -> None:
        """It was somebody's doing, if a step is committed without that one; and what ran out before was not too short."""
        self._blamed = True

    def found(self) -> None:
        """It was somebody's doing: what had got stuck is counted since it goes another way. What ran out was not too short."""
        if self._before is not None:
            self._factor, self._before = self._before, None

    def waited(self, factor: float) -> None:
        """Something came after so many times its time-out."""
        self._needed = max(self._needed, SPARE * factor)

    def committed(self) -> None:
        """A step was committed. What it needed it may need again: we do not become so impatient that we give up what is on its way. But never more
        patient for it: else whoever is always a little late would be waited for longer and longer.
        """
        if self._blamed and self._before is not None:
            self._factor = self._before
        self._factor = max(1.0, DECAY * self._factor, min(self._factor, self._needed))
        self._before, self._blamed, self._needed = None, False, 0.0


class ProgressTimer:
    """When something was last counted in a step, which began at `now`, and how long it took at most until something was."""

    def __init__(self, now: float) -> None:
        self.since = now
        self._longest = math.inf
        """Until something has been counted, nobody knows how long it takes."""
        self._flowing = math.inf
        """The same without the first one, which is as long as the pipeline needs to fill."""
        self._urged = False

    def over(self, now: float) -> None:
        """Something was counted, or handed out."""
        lull = now - self.since
        if math.isinf(self._longest):
            self._longest = lull
        else:
            self._longest = max(self._longest, lull)
            self._flowing = lull if math.isinf(self._flowing) else max(self._flowing, lull)
        self.since, self._urged = now, False

    def is_unusual(self, now: float) -> bool:
        """Whether it is longer than any before: what is left may be at somebody slow (Dean and Barroso, The tail at scale)."""
        return now - self.since > max(LULL_S, LONGER * self._longest)

    def urges(self, now: float) -> bool:
        """Whether everybody is to say what it has, which costs next to nothing: once in a lull, and sooner."""
        if self._urged or now - self.since <= max(LULL_S, LONGER * self._flowing):
            return False
        self._urged = True
        return True


def few(microbatches: int) -> int:
    """So many undone ids are the last of a step."""
    return max(1, int(HEDGED * microbatches))
