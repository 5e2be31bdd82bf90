"""Late joiners: volunteers that enter a step while it runs, to share its work or to hold an orphaned block.

Pure. Where peers come and go in minutes, a step is too long to wait for its end. A prepared volunteer fetches
the state with which the step began and enters. It fetches from other holders, or from the checkpoint store if
a block has lost its last one. So the step need not be given up for an orphaned block: the others keep their
work, and leftovers find their way to the new holder (docs/protocol.md, leftovers). The run rolls back only
when nobody comes and a redundant volunteer could be moved there.
"""

from __future__ import annotations

from hetpeer.bootstrap.coordinator.step import CoordinatedStep
from hetpeer.bootstrap.coordinator.step_barrier import PAYS, StepBarrier
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect
from hetpeer.bootstrap.state.volunteer_state import LifeCycle, VolunteerState


class LateJoiners:
    """Late joiners of one term."""

    def __init__(self, context: CoordinatorContext, barrier: StepBarrier) -> None:
        self._context = context
        self._barrier = barrier
        self._hopeless_since: float | None = None

    def can_wait(self, step: CoordinatedStep) -> bool:
        """Whether `step` may go on without a holder of some block: its state can be fetched, and there is
        work to keep.
        """
        return self._context.history.stored and bool(step.roster)

    def fetch(self, step: CoordinatedStep, now: float) -> list[Effect]:
        """Tell prepared volunteers to fetch the state of `step`, if they are needed or would still
        be of use.
        """
        return [
            self._barrier.fetch(volunteer, now)
            for volunteer in self._outside(step)
            if volunteer.life_cycle is LifeCycle.PREPARED
            and (self._is_missing(step, volunteer) or self._pays(step, volunteer, now))
        ]

    def takes(self, step: CoordinatedStep | None, volunteer: VolunteerState) -> bool:
        """Whether `volunteer`, which has the current state, enters the running step."""
        if step is None or volunteer not in self._outside(step):
            return False
        welcome = not step.shuts_out(volunteer.peer) and not step.reduction.under_way
        return self._is_missing(step, volunteer) or welcome

    def hopeless(self, step: CoordinatedStep, now: float) -> bool:
        """Whether nobody has prepared for an orphaned block for `move_s` while a redundant volunteer could
        move there.
        """
        members, blocks = self._context.members, step.orphaned
        coming = {b for v in self._outside(step) if not v.slow for b in range(*(v.place or (0, 0)))}
        if coming.issuperset(blocks):
            self._hopeless_since = None
            return False
        if self._hopeless_since is None:
            self._hopeless_since = now
        return now - self._hopeless_since >= self._context.config.move_s and members.spare() is not None

    def _outside(self, step: CoordinatedStep) -> list[VolunteerState]:
        """Volunteers with a place that could enter."""
        here = [v for v in self._context.members.volunteers.values() if v.place is not None]
        return [v for v in here if v.peer not in step.roster and not self._context.failures.rests(v.peer)]

    def _is_missing(self, step: CoordinatedStep, volunteer: VolunteerState) -> bool:
        """Whether the step cannot end without a holder of `volunteer`'s place."""
        return not set(step.orphaned).isdisjoint(range(*(volunteer.place or (0, 0))))

    def _pays(self, step: CoordinatedStep, volunteer: VolunteerState, now: float) -> bool:
        if step.shuts_out(volunteer.peer) or step.reduction.under_way:
            return False
        if not self._barrier.available(volunteer.place):
            return False
        return step.remaining_s(now) >= PAYS * self._barrier.fetch_s
