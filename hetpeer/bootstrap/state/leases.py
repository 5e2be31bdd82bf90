"""Leases: which volunteers are still there, with a grace for broken streams and for our own pauses.

Pure. A lease decides how soon work goes to somebody else, never what counts: a volunteer that comes back
after it was lost is fenced by its incarnation.
"""

from __future__ import annotations

from hetpeer.bootstrap.state.context import CoordinatorContext

MAX_TICK_S = 1.0
"""Longest time between two ticks. A longer one means that this machine was suspended."""


class Leases:
    """Leases of one term that began at `now`."""

    def __init__(self, context: CoordinatorContext, now: float) -> None:
        self._context = context
        self._ticked_at = now

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
        config, gone = self._context.config, {}
        for peer, volunteer in self._context.members.volunteers.items():
            if volunteer.broken_at is not None and now - volunteer.broken_at > config.grace_s:
                gone[peer] = "stream broken"
            elif now - volunteer.heard_at > config.lease_s:
                gone[peer] = "lease expired"
        return gone

    def broken(self, peer: str, now: float) -> None:
        """The stream of `peer` broke; it may come back within the grace."""
        volunteer = self._context.members.volunteers.get(peer)
        if volunteer is not None and volunteer.broken_at is None:
            volunteer.broken_at = now

    def heard(self, peer: str, now: float) -> None:
        """`peer` has sent a message, or its stream is back."""
        volunteer = self._context.members.volunteers.get(peer)
        if volunteer is not None:
            volunteer.broken_at, volunteer.heard_at = None, now
