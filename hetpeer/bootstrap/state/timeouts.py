"""Timeouts of the coordinator: leases of volunteers, factors that adapt to the swarm, and a step's progress.

Pure. A lease has a grace for broken streams and for our own pauses. It decides how soon work goes to somebody
else, never what counts: a volunteer that comes back after it was lost is fenced by its incarnation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetpeer.bootstrap.state.context import CoordinatorContext

MAX_TICK_S = 1.0
"""Longest time between two ticks. A longer one means that this machine was suspended."""

MAX_FACTOR = 64.0
DECAY = 0.8
SPARE = 1.5
"""Reserve: the next wait may take this many times as long as the longest one."""
LEAST_WAIT_S = 1.0
LONGER = 2.0


class Leases:
    """Leases of one term that began at `now`."""

    def __init__(self, context: CoordinatorContext, now: float) -> None:
        self._context = context
        self._ticked_at = now
        self._spared_until = now

    def tick(self, now: float) -> float:
        """Seconds for which we did not listen since the last tick; all leases are extended by them."""
        pause = max(0.0, now - self._ticked_at - MAX_TICK_S)
        self._ticked_at = now
        for volunteer in self._context.members.volunteers.values():
            volunteer.heard_at = min(now, volunteer.heard_at + pause)
            if volunteer.broken_at is not None:
                volunteer.broken_at = min(now, volunteer.broken_at + pause)
        return pause

    def expired(self, now: float) -> dict[str, str]:
        """Volunteers that are not heard any more → reason."""
        if now < self._spared_until:
            return {}
        config, gone = self._context.config, {}
        for peer, volunteer in self._context.members.volunteers.items():
            if volunteer.broken_at is not None and now - volunteer.broken_at > config.grace_s:
                gone[peer] = "stream broken"
            elif now - volunteer.heard_at > config.lease_s:
                gone[peer] = "lease expired"
        return gone

    def renewed(self, now: float) -> None:
        """All streams broke at once, with our network process or our line: no volunteer is to blame.

        Nobody is lost before they had the time in which a coordinator that was away is found.
        """
        self._spared_until = now + self._context.config.return_s

    def broken(self, peer: str, now: float) -> None:
        """The stream of `peer` broke; it may come back within the grace."""
        volunteer = self._context.members.volunteers.get(peer)
        if volunteer is not None and volunteer.broken_at is None:
            volunteer.broken_at = now


class AdaptiveTimeouts:
    """A factor on timeouts: it doubles when one proves too short, and shrinks slowly with each commit."""

    def __init__(self) -> None:
        self._factor = 1.0
        self._before: float | None = None
        """The factor before anything timed out since the last commit."""
        self._blamed = False
        self._needed = 0.0
        """The factor that would have been enough since the last commit."""

    def scaled(self, seconds: float) -> float:
        """`seconds` times the factor."""
        return seconds * self._factor

    def ran_out(self) -> None:
        """Something timed out: double the factor."""
        if self._before is None:
            self._before = self._factor
        self._factor = min(2 * self._factor, MAX_FACTOR)

    def blamed(self) -> None:
        """A peer was to blame: if the step is committed without it, earlier timeouts were not too short."""
        self._blamed = True

    def found(self) -> None:
        """Stuck ids are counted after a reroute, so a peer was to blame: undo the doubling."""
        if self._before is not None:
            self._factor, self._before = self._before, None

    def waited(self, factor: float) -> None:
        """Something arrived after this many times its timeout."""
        self._needed = max(self._needed, SPARE * factor)

    def committed(self) -> None:
        """A step is committed: shrink the factor, but not below what the step needed.

        It is never raised: a peer that is always a little late would be waited for longer and longer.
        """
        if self._blamed and self._before is not None:
            self._factor = self._before
        self._factor = max(1.0, DECAY * self._factor, min(self._factor, self._needed))
        self._before, self._blamed, self._needed = None, False, 0.0


@dataclass(slots=True)
class ProgressTimer:
    """Time since something was last counted in a step that began at `since`, and the longest such time."""

    since: float
    _longest: float = math.inf
    """Longest time without progress; unknown until something has been counted."""
    _flowing: float = math.inf
    """The same without the first one, which is as long as the pipeline takes to fill."""
    _urged: bool = False

    def over(self, now: float) -> None:
        """Note progress: something was counted, or handed out."""
        waited = now - self.since
        if math.isinf(self._longest):
            self._longest = waited
        else:
            self._longest = max(self._longest, waited)
            self._flowing = waited if math.isinf(self._flowing) else max(self._flowing, waited)
        self.since, self._urged = now, False

    def is_unusual(self, now: float) -> bool:
        """Whether the wait is longer than any before: a slow peer may have the rest (Dean, Tail at Scale)."""
        return now - self.since > max(LEAST_WAIT_S, LONGER * self._longest)

    def urges(self, now: float) -> bool:
        """Whether to ask all for reports, which is cheap: once without progress, earlier than a reroute."""
        if self._urged or now - self.since <= max(LEAST_WAIT_S, LONGER * self._flowing):
            return False
        self._urged = True
        return True
