"""Going back: the version with which a run goes on for want of a holder, and what it gives up for that.

Pure. The coordinator gives up the steps under way and goes on in a new view: with the version that holds
now if its state can be had, otherwise with the last checkpoint. A cluster that has no checkpoint of its own
falls apart (docs/grouped.md, "Going back"). machine.py makes the transition.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.checkpoint_collection import CheckpointCollection
from hetpeer.bootstrap.coordinator.move_watch import MoveWatch
from hetpeer.bootstrap.coordinator.run_policy import RunPolicy
from hetpeer.bootstrap.coordinator.step import CoordinatedStep
from hetpeer.bootstrap.coordinator.step_barrier import StepBarrier
from hetpeer.bootstrap.coordinator.steps import StepQueue
from hetpeer.bootstrap.state.backups import kept
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect, Send


@dataclass(frozen=True, slots=True)
class Retreat:
    """A decision to give up the steps under way for the reason `why`."""

    why: str
    version: int | None
    """Version to go on with; None: there is none, and the cluster falls apart."""
    awaited: frozenset[str] = frozenset()
    """Last holders of a block that may bring it back."""
    until: float = 0.0
    """Time until which they are awaited, in the coordinator's seconds."""


class Rollback:
    """Decisions to go back, in one term, and the way to the version that was decided on."""

    def __init__(
        self,
        context: CoordinatorContext,
        policy: RunPolicy,
        barrier: StepBarrier,
        steps: StepQueue,
        checkpoints: CheckpointCollection,
        move_watch: MoveWatch,
    ) -> None:
        self._context = context
        self._policy = policy
        self._barrier = barrier
        self._steps = steps
        self._checkpoints = checkpoints
        self._move_watch = move_watch

    # ── decisions ───────────────────────────────────────────────────────────────────────────────────────────

    def to_checkpoint(self, why: str) -> Retreat:
        """Go back to the last complete checkpoint, if the run can go on with that."""
        return Retreat(why, self._policy.goes_back_to())

    def without_holder(self, why: str) -> Retreat:
        """Give up the steps, which lack a holder of a block. Those who may bring it back are awaited, or
        others fetch the version from the store.
        """
        members, history = self._context.members, self._context.history
        awaited = frozenset(self._barrier.awaited)
        at_hand = history.stored or kept(members, history.version).issuperset(members.uncovered())
        if not awaited and not at_hand:
            return self.to_checkpoint(why)
        return Retreat(why, history.version, awaited, self._barrier.return_by)

    def for_orphans(self, step: CoordinatedStep, now: float) -> Retreat | None:
        """Give `step` up if nobody comes any more for a block that it lacks; None: it goes on."""
        policy, history = self._policy, self._context.history
        if step.orphaned and (why := policy.gap_is_final(now)):
            return self.to_checkpoint(why)
        if not self._barrier.hopeless(step, now):
            return None
        why = f"nobody comes for block {step.orphaned[0]}"
        if policy.whole_run:
            return self.to_checkpoint(why)
        return Retreat(why, history.version) if history.stored else None

    # ── the way back ────────────────────────────────────────────────────────────────────────────────────────

    def begin_anew(self, version: int, why: str, holders: Iterable[str], now: float) -> list[Effect]:
        """Give up all that is under way, write the record, and tell everybody, in the view that is new.

        `holders` have `version` if it is the one that holds now: they are waited for.
        """
        context, line = self._context, self._context.line
        given_up = self._steps.clear()
        stopped = self._move_watch.stop(f"the run went back: {why}")
        self._checkpoints.abandon()
        self._barrier.leave()
        same = version == context.history.version
        record = context.log(
            kind="rollback", term=line.term, view=line.view, to_version=version, why=why, **given_up
        )
        context.members.start_over(same=same)
        self._barrier.gather([context.members.volunteers[peer] for peer in holders], now)
        told = m.RolledBack(line=line, version=version, why=why)
        return [*stopped, record, *(Send(peer, told) for peer in context.members.volunteers)]
