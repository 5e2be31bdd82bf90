"""How a reign loses volunteers: who is gone, who has to come back as another, and when the whole run goes back for it.

Pure. A volunteer's slots die with it; what it alone held is had from the last checkpoint, or somebody comes into the step for it (late_joiners.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.commits import done_with
from hetpeer.bootstrap.coordinator.late_joiners import LateJoiners
from hetpeer.bootstrap.coordinator.rebalancing import Rebalancing
from hetpeer.bootstrap.coordinator.status_view import Reigning
from hetpeer.bootstrap.coordinator.step import CoordinatedStep
from hetpeer.bootstrap.coordinator.step_barrier import StepBarrier
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import CoordinatorState, Disconnect, Effect, Send
from hetpeer.bootstrap.state.failed_microbatches import room_s
from hetpeer.bootstrap.state.membership import LifeCycle, Volunteer


class Losing(Reigning):
    """A reign in which volunteers leave. What goes on without them is the coordinator's."""

    def __init__(self, context: CoordinatorContext, now: float) -> None:
        super().__init__(context, now)
        self._barrier = StepBarrier(self._context, now)
        self._late_joiners = LateJoiners(self._context, self._barrier)
        self._rebalancing = Rebalancing(self._context, self._checkpoints)

    @abstractmethod
    def _cross(self, now: float) -> list[Effect]:
        """Between two steps: what is next."""

    @abstractmethod
    def _admit(self, now: float) -> list[Effect]:
        """Who is to come into the step that runs fetches its state."""

    @abstractmethod
    def _follow(self, step: CoordinatedStep, now: float) -> list[Effect]:
        """What became of the step."""

    def _fence(self, peers: Mapping[str, str], now: float) -> list[Effect]:
        """`peers` (with the reason for each) must come back with new incarnations."""
        effects = self._lose(peers, now)
        for peer, why in peers.items():
            effects += [Send(peer, m.Fenced(why=why)), Disconnect(peer)]
        return effects

    def _turn_out(self, out: Mapping[str, str], liars: Collection[str], now: float) -> list[Effect]:
        """`out` (with the reason for each) have to come back as others; `liars` among them not after the third time."""
        for peer in liars:
            self._context.quarrels.turned_out(peer, shunned=True)
        banned = done_with(self._context, self.history.version - 1, out)
        return [*banned, *self._fence(out, now)]

    def _relapsed(self, volunteer: Volunteer, now: float) -> list[Effect]:
        """`volunteer` was ready, and takes that back. It rests, the longer the oftener it does: what others do again for it is not to grow with its messages. Who does
        so again and again where nobody else holds its blocks makes room for others.
        """
        quarrels, peer = self._context.quarrels, volunteer.peer
        quarrels.waited_in_vain([peer])
        if quarrels.is_fickle(peer) and self.members.held_only_by([volunteer]):
            self._make_room_for_others([peer], now)
        return self._leave_step([volunteer], now)

    def _make_room_for_others(self, peers: Sequence[str], now: float) -> None:
        self._context.failures.rest(peers, room_s(self._context.config), now)

    def _lose(self, peers: Mapping[str, str], now: float) -> list[Effect]:
        """`peers` (with the reason for each) are not members any more; their slots die with them."""
        if not peers:
            return []
        self._rebalancing.void()
        version = self.history.version
        effects: list[Effect] = [
            self._context.log(kind="gone", peer=peer, why=why, version=version) for peer, why in peers.items()
        ]
        effects += self._leave_step([self.members.volunteers[peer] for peer in peers], now)
        for peer in peers:
            self.members.volunteers.pop(peer, None)  # what was found out meanwhile may have ended it already
        return effects

    def _leave_step(self, volunteers: Sequence[Volunteer], now: float) -> list[Effect]:
        """They take no further part in the step; without another holder of a block of theirs the run goes back."""
        lost = self.members.held_only_by(volunteers)
        for volunteer in volunteers:
            self._checkpoints.lost(volunteer.peer)
            volunteer.life_cycle = LifeCycle.JOINING
        left = self._steps.leave([volunteer.peer for volunteer in volunteers])
        if any(left.values()):
            orphaned, fresh = self._steps.orphaned, self._steps.fresh
            if orphaned and (fresh is None or not self._late_joiners.can_wait(fresh)):
                return self._roll_back(f"no holder is left of block {orphaned[0]}", now)
            effects = self._steps.without(left, now)
            effects += self._follow(self._steps.first, now)
            return effects + self._admit(now)
        if lost and not self._context.stored:
            return self._roll_back(f"no holder is left of block {lost[0]}", now)
        return self._cross(now) if volunteers and self.state is CoordinatorState.SYNCING else []

    def _roll_back(self, why: str, now: float) -> list[Effect]:
        """All holders of a block are gone: the whole run goes back to the last complete checkpoint."""
        return self._go_back(self.history.checkpoint_version, why, now)

    def _go_back(self, version: int, why: str, now: float) -> list[Effect]:
        """The run goes on with `version`, whatever was begun since. Who has its state keeps it."""
        context = self._context
        given_up = self._steps.clear()
        self._checkpoints.abandon()
        self._barrier.leave()
        holders = self.members.roster() if version == self.history.version else {}
        context.state = CoordinatorState.WAITING
        context.line = line = m.Line(term=self.line.term, view=self.line.view + 1)
        record = context.log(
            kind="rollback", term=line.term, view=line.view, to_version=version, why=why, **given_up
        )
        self.members.start_over()
        self._barrier.gather([self.members.volunteers[peer] for peer in holders], now)
        told = m.RolledBack(line=line, version=version, why=why)
        return [record, *(Send(peer, told) for peer in self.members.volunteers), *self._cross(now)]
