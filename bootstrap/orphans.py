"""Blocks of a running step that have lost their last holder, while their state lies in the checkpoint store.

Pure. The step need not be given up: everybody else keeps what is done. Somebody who is prepared for these blocks fetches
the state and comes into the step; what senders keep for them is left over and finds its way there (docs/protocol.md,
leftovers). Only when nobody comes, and somebody could be spared elsewhere, does the run go back.
"""

from __future__ import annotations

from hetpeer.bootstrap.border import Border
from hetpeer.bootstrap.decisions import Effect
from hetpeer.bootstrap.membership import Standing, Volunteer
from hetpeer.bootstrap.reign import Reign
from hetpeer.bootstrap.training import CoordinatedStep


class Orphans:
    """Those of one reign."""

    def __init__(self, reign: Reign, border: Border) -> None:
        self._reign = reign
        self._border = border
        self._hopeless_since: float | None = None

    def can_wait(self, step: CoordinatedStep) -> bool:
        """Whether `step` may go on without a holder of some block: others can have its state, and there is work to keep."""
        return self._reign.stored and bool(step.roster)

    def fetch(self, step: CoordinatedStep) -> list[Effect]:
        """Volunteers who are prepared for orphaned blocks are told to fetch them, in the middle of `step`."""
        return [
            self._border.fetch(volunteer)
            for volunteer in self._candidates(step)
            if volunteer.standing is Standing.PREPARED
        ]

    def takes(self, step: CoordinatedStep | None, volunteer: Volunteer) -> bool:
        """Whether `volunteer`, who has the current state, comes into the running step because of its blocks."""
        return step is not None and volunteer in self._candidates(step)

    def hopeless(self, step: CoordinatedStep, now: float) -> bool:
        """Whether nobody prepares for an orphaned block for too long, while a redundant volunteer could move there."""
        members, blocks = self._reign.members, step.orphaned
        coming = {b for v in self._candidates(step) for b in range(*(v.place or (0, 0)))}
        if coming.issuperset(blocks):
            self._hopeless_since = None
            return False
        if self._hopeless_since is None:
            self._hopeless_since = now
        return now - self._hopeless_since >= self._reign.config.move_s and members.spare() is not None

    def _candidates(self, step: CoordinatedStep) -> list[Volunteer]:
        """Volunteers outside of the step whose places have orphaned blocks."""
        orphaned = set(step.orphaned)
        return [
            volunteer
            for volunteer in self._reign.members.volunteers.values()
            if volunteer.peer not in step.roster
            and volunteer.place is not None
            and orphaned.intersection(range(*volunteer.place))
        ]
