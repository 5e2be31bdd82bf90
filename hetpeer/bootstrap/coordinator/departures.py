"""Volunteers leave, and what a run does for want of them: lost, fenced and relapsed volunteers.

Pure. A volunteer's slots are lost with it. The state that it alone held is fetched from the last checkpoint,
or a late joiner comes into the step for it (step_barrier.py). Whether the run rolls back for it is decided
here; how it does is the state machine's. `RunPolicy` is where a coordinator of a whole run and one of a
single cluster (bootstrap/grouped/cluster.py) decide differently.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.commits import ban_records
from hetpeer.bootstrap.coordinator.step_barrier import LONGEST_ABSENCE_S, StepBarrier
from hetpeer.bootstrap.log.record_text import FAREWELL
from hetpeer.bootstrap.state import backups
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Disconnect, Effect, Send
from hetpeer.bootstrap.state.failed_microbatches import room_s
from hetpeer.bootstrap.state.volunteer_state import VolunteerState

if TYPE_CHECKING:
    from hetpeer.bootstrap.coordinator.machine import Machine


class RunPolicy(Protocol):
    """Decisions that the state machine and departures leave to the kind of run."""

    @property
    def whole_run(self) -> bool:
        """Whether this is the whole run, which it completes, and whose planner divides its blocks anew."""

    @property
    def may_begin(self) -> bool:
        """Whether steps may begin at all."""

    @property
    def dissolved(self) -> str | None:
        """Reason why the cluster has fallen apart; None as long as it stands."""

    @property
    def kept_version(self) -> int:
        """The version up to which no update is lost with a block whose last holder is gone for good."""

    def coming_for(self, missing: Sequence[int]) -> Sequence[VolunteerState]:
        """Volunteers that come for the `missing` blocks, so that the step begins; none: it waits for them."""

    def goes_back_to(self) -> int | None:
        """Version to go on with where the newest one cannot be had any more; None: fall apart."""

    def gap_is_final(self, now: float) -> str | None:
        """A block has no holder: why nobody is waited for any longer, or None."""

    def is_stuck(self, stalls: int, now: float) -> str | None:
        """The step's work was handed out again `stalls` times in vain: why it is given up, or None."""

    def vacated(self, volunteers: Sequence[VolunteerState]) -> list[int]:
        """Blocks for which nobody is here once `volunteers` have left, if that alone is the end."""

    def rest(self, peers: Sequence[str], now: float) -> None:
        """`peers` make room, so that others can try their blocks."""

    def dissolve(self, why: str, given_up: Mapping[str, Any]) -> None:
        """The cluster falls apart, with the log fields of the steps it gives up."""


class WholeRun:
    """One coordinator for the run: it waits for holders, moves volunteers, and rolls back when both fail."""

    whole_run = True
    may_begin = True
    dissolved = None

    def __init__(self, context: CoordinatorContext, barrier: StepBarrier) -> None:
        self._context = context
        self._barrier = barrier

    @property
    def kept_version(self) -> int:
        """That of the last checkpoint."""
        return self._context.history.checkpoint_version

    def coming_for(self, missing: Sequence[int]) -> Sequence[VolunteerState]:  # noqa: ARG002
        """None: steps begin when all blocks are held."""
        return ()

    def goes_back_to(self) -> int:
        """That of the last checkpoint."""
        return self._context.history.checkpoint_version

    def gap_is_final(self, now: float) -> str | None:
        """Reason to go back, once holders had time to come back and the state is not stored; else None."""
        late = self._barrier.too_late(now)
        return "the holders of the last version did not come back in time" if late else None

    def is_stuck(self, stalls: int, now: float) -> str | None:  # noqa: ARG002
        """None always: a step's work is handed out again until it is done."""
        return None

    def vacated(self, volunteers: Sequence[VolunteerState]) -> list[int]:  # noqa: ARG002
        """None: late joiners, the checkpoint and moved volunteers come first."""
        return []

    def rest(self, peers: Sequence[str], now: float) -> None:
        """Let `peers` rest until others could be moved to their blocks."""
        self._context.failures.rest(peers, room_s(self._context.config), now)

    def dissolve(self, why: str, given_up: Mapping[str, Any]) -> None:
        """Nothing: a whole run rolls back instead."""


class Departures:
    """All departures of one term."""

    def __init__(self, context: CoordinatorContext, machine: Machine) -> None:
        self._context = context
        self._machine = machine

    def farewell(self, volunteer: VolunteerState, within_s: float, now: float) -> list[Effect]:
        """`volunteer` leaves: now, or in at most `within_s` seconds if it is the last holder of a block."""
        if within_s <= 0.0:
            lost = self.lose({volunteer.peer: FAREWELL}, now)
            return [*lost, Disconnect(volunteer.peer)]
        by = now + min(within_s, LONGEST_ABSENCE_S)
        volunteer.leaves_by = by if volunteer.leaves_by is None else min(by, volunteer.leaves_by)
        return self.see_off(now)

    def see_off(self, now: float) -> list[Effect]:
        """Release leaving volunteers that nobody needs any more, or whose time is over.

        The current version is stored for those that stay.
        """
        context, machine, effects = self._context, self._machine, list[Effect]()
        for volunteer in context.members.leaving():
            peer = volunteer.peer
            if context.members.volunteers.get(peer) is not volunteer or volunteer.leaves_by is None:
                continue  # it was lost with one before it
            safe = context.history.stored or not context.members.is_last_holder(volunteer)
            if safe or not machine.policy.whole_run or now >= volunteer.leaves_by:
                effects += self.lose({peer: FAREWELL}, now)
                effects += [Send(peer, m.Released(safe=safe)), Disconnect(peer)]
        if context.members.leaving():
            effects += machine.checkpoints.begin(wanted=True)
        return effects

    def fence(self, peers: Mapping[str, str], now: float) -> list[Effect]:
        """End the incarnations of `peers` (peer → reason): they must come back with new ones."""
        effects = self.lose(peers, now)
        for peer, why in peers.items():
            effects += [Send(peer, m.Fenced(why=why)), Disconnect(peer)]
        return effects

    def fence_liars(self, peers: Mapping[str, str], liars: Collection[str], now: float) -> list[Effect]:
        """Fence `peers` (peer → reason). `liars` among them are banned after the third time."""
        for peer in liars:
            self._context.disputed_pairs.fenced(peer, shunned=True)
        banned = ban_records(self._context, self._context.history.version - 1, peers)
        return [*banned, *self.fence(peers, now)]

    def relapsed(self, volunteer: VolunteerState, now: float) -> list[Effect]:
        """`volunteer` was ready and takes that back: it leaves the step and rests, longer each time.

        Otherwise others' repeated work would grow with its messages. If it does so again and again and nobody
        else holds its blocks, it makes room for others.
        """
        disputed_pairs, peer = self._context.disputed_pairs, volunteer.peer
        disputed_pairs.waited_in_vain([peer])
        if disputed_pairs.is_fickle(peer) and self._context.members.held_only_by([volunteer]):
            self._machine.policy.rest([peer], now)
        return self._leave_step([volunteer], now)

    def left_behind(self, volunteers: Sequence[VolunteerState], now: float) -> list[Effect]:
        """`volunteers` have missed the newest version: they leave the steps and prepare for a later one."""
        if not volunteers:
            return []
        effects = self._leave_step(volunteers, now)
        for volunteer in volunteers:
            volunteer.prepare()
        return effects

    def lose(self, peers: Mapping[str, str], now: float, *, back: bool = False) -> list[Effect]:
        """`peers` (peer → reason) are no members any more; their slots are lost with them.

        `back`: they may come back with the state that they hold. If they alone hold it, they are awaited.
        Nothing is logged of a peer that never had a place: sessions cost a stranger nothing.
        """
        if not peers:
            return []
        context = self._context
        self._machine.rebalancing.left(peers)
        version = context.history.version
        effects: list[Effect] = [
            context.log(kind="gone", peer=peer, why=why, version=version)
            for peer, why in peers.items()
            if context.members.volunteers[peer].place is not None
        ]
        effects += self._leave_step([context.members.volunteers[peer] for peer in peers], now, back=back)
        for peer in peers:
            context.members.volunteers.pop(peer, None)  # a consequence may have removed it already
        return effects

    def _leave_step(
        self, volunteers: Sequence[VolunteerState], now: float, *, back: bool = False
    ) -> list[Effect]:
        """Take `volunteers` out of all steps. If one of their blocks has no other holder, and its state is
        neither stored nor with a backup, wait for them if they may come `back`, and roll back otherwise.
        """
        machine, stored, members = self._machine, self._context.history.stored, self._context.members
        kept = backups.kept(members, self._context.history.version)
        if vacated := machine.policy.vacated(volunteers):
            return machine.dissolve(f"no holder is left of block {vacated[0]}")
        alone = set(members.held_only_by(volunteers))
        lost = [] if stored else sorted(alone - kept)
        if alone.difference(lost):
            machine.barrier.await_another(now)
        if lost and back:
            peers = [volunteer.peer for volunteer in volunteers]
            ready = backups.standing_by(members, self._context.history.checkpoint_version).issuperset(lost)
            if ready and all(volunteer.broken_at is not None for volunteer in volunteers):
                machine.barrier.await_shortly(peers, now)
            else:
                machine.barrier.await_back(peers, machine.policy.kept_version, now)
        elif lost:
            machine.barrier.awaited.clear()
        awaited = machine.barrier.awaited
        for volunteer in volunteers:
            machine.checkpoints.lost(volunteer.peer)
            volunteer.rejoin()
        left = machine.steps.leave([volunteer.peer for volunteer in volunteers])
        if any(left.values()):
            orphaned, fresh = machine.steps.orphaned, machine.steps.fresh
            available = stored or awaited or kept.issuperset(orphaned)  # else no late joiner has the state
            if orphaned and not (available and fresh is not None and fresh.roster):
                return machine.without_holder(f"no holder is left of block {orphaned[0]}", now)
            effects = machine.steps.without(left, now)
            effects += machine.follow(machine.steps.first, now)
            return effects + machine.admit(now)
        if lost and not awaited:
            return machine.roll_back(f"no holder is left of block {lost[0]}", now)
        return machine.left(now) if volunteers else []
