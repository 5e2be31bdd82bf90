"""Volunteers leave, and what a run does for want of them: lost, fenced and relapsed volunteers.

Pure. A volunteer's slots are lost with it. The state that it alone held is fetched from the last checkpoint,
or a late joiner comes into the step for it (step_barrier.py). Whether the run rolls back for it is decided
here; how it does is the state machine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.step_barrier import LONGEST_ABSENCE_S
from hetpeer.bootstrap.log.record_text import FAREWELL
from hetpeer.bootstrap.state import backups
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Disconnect, Effect, Send
from hetpeer.bootstrap.state.volunteer_state import VolunteerState

if TYPE_CHECKING:
    from hetpeer.bootstrap.coordinator.machine import Machine


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
