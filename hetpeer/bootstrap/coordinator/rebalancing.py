"""Rebalancing: a planner proposes another division of the blocks while the run goes on.

Pure. Volunteers that get other blocks lose their state. So they are moved only while everybody can fetch the
current version from the checkpoint store (docs/planning.md, "Replanning a running swarm").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.coordinator.checkpoint_collection import CheckpointCollection
from hetpeer.bootstrap.coordinator.move_watch import MoveWatch
from hetpeer.bootstrap.log.moves import MovePromise
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect, Send
from hetpeer.bootstrap.state.membership import is_cut
from hetpeer.bootstrap.state.volunteer_state import LifeCycle, VolunteerState

RESTS = 10
"""Sync timeouts before the next proposal after waiting for a checkpoint in vain; doubled each time."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Places from now on: `layouts[c]` is cluster c's cut of blocks; `seats`: peer → (cluster, blocks).

    `promise`: expectation of it, which is held against what comes; None: nothing is expected. `backups`:
    volunteers with a seat that take part in no step.
    """

    layouts: Sequence[Sequence[Range]]
    seats: Mapping[str, tuple[int, Range]]
    promise: MovePromise | None = None
    backups: frozenset[str] = frozenset()
    plan: str = ""
    """Id of the plan that it enacts; empty: a planner's own."""

    def fault(self, blocks: int) -> str | None:
        """Reason why the arrangement does not fit a model of `blocks` blocks; None if it fits."""
        for cluster, layout in enumerate(self.layouts):
            if not is_cut(layout, blocks):
                return f"cluster {cluster} does not cut {blocks} blocks"
        taken = list(self.seats.values())
        if len(set(taken)) < len(taken):
            return "two volunteers have one place"
        for peer, (cluster, place) in self.seats.items():
            if not 0 <= cluster < len(self.layouts) or place not in self.layouts[cluster]:
                return f"{peer} has a place that no cluster has"
        if strangers := self.backups - self.seats.keys():
            return f"{min(strangers)} is a backup without a place"
        if self.backups and (alone := set(range(blocks)).difference(*self.working.values())):
            return f"block {min(alone)} has backups alone"
        return None

    @property
    def working(self) -> dict[str, range]:
        """Volunteer that takes part in steps → its blocks."""
        return {peer: range(*place) for peer, (_, place) in self.seats.items() if peer not in self.backups}


class Rebalancing:
    """At most one waiting proposal.

    It is void if a volunteer leaves that has a seat in it, or its checkpoint fails or takes too long. Those
    that came after it was made do not matter: otherwise a stranger that comes and goes could stop all moves.
    """

    def __init__(self, context: CoordinatorContext, saving: CheckpointCollection, watch: MoveWatch) -> None:
        self._context = context
        self._checkpoints = saving
        self._watch = watch
        self._proposal: Arrangement | None = None
        self._failures = 0
        """Failed checkpoints before the proposal was made."""
        self._until: float | None = None
        """Deadline of the checkpoint for which the run stands still."""
        self._rest_s = RESTS * context.config.sync_s
        self._not_before = 0.0
        """No proposal is taken before: the run stood still for the last one in vain."""

    def propose(self, arrangement: Arrangement, now: float) -> bool:
        """Note a proposal. Returns whether it can take effect now. Raises `ValueError` if it does not fit."""
        if fault := arrangement.fault(self._context.members.blocks):
            raise ValueError(fault)
        if now < self._not_before:
            return False
        self._until = self._until if self.pending else None
        self._proposal, self._failures = arrangement, self._checkpoints.failures
        return self.pending

    def left(self, peers: Collection[str]) -> None:
        """Drop the proposal if one of `peers`, which leave, is to work in it; it can do without backups."""
        if self._proposal is not None and not self._proposal.working.keys().isdisjoint(peers):
            self._proposal = None

    @property
    def pending(self) -> bool:
        """Whether a proposal waits for the current version to be stored."""
        proposal = self._proposal
        if proposal is None:
            return False
        present = {v.peer for v in self._context.members.volunteers.values() if v.place is not None}
        if not proposal.working.keys() <= present or self._checkpoints.failures != self._failures:
            self._proposal = None
        return self._proposal is not None

    def waits(self, now: float) -> bool:
        """Whether the run stands still at the barrier for the checkpoint to be complete; `sync_s` at most."""
        if not (self.pending and self._checkpoints.under_way):
            return False
        if self._until is None:
            self._until = now + self._context.config.sync_s
        if now > self._until:
            self._proposal, self._not_before = None, now + self._rest_s
            self._rest_s *= 2
        return self._proposal is not None

    def enact(self, now: float) -> list[Effect]:
        """Give everybody the proposed place, and tell volunteers whose blocks change."""
        assert self._proposal is not None
        assert self._context.history.stored
        proposal, self._proposal = self._proposal, None
        self._rest_s = RESTS * self._context.config.sync_s
        members = self._context.members
        promise = proposal.promise
        before = {peer: v.place for peer, v in members.volunteers.items() if v.place is not None}
        seats = {peer: seat for peer, seat in proposal.seats.items() if peer in before}
        spared = members.backups
        members.backups = (proposal.backups & seats.keys()) | (spared & before.keys() - seats.keys())
        effects: list[Effect] = [
            self._context.log(
                kind="arranged",
                layouts=[[list(place) for place in layout] for layout in proposal.layouts],
                backups=sorted(members.backups),
                **({} if promise is None else {"promise": promise.model_dump()}),
                **({"plan": proposal.plan} if proposal.plan else {}),
            )
        ]
        if promise is not None:
            self._watch.begin({peer: proposal.seats[peer][1] for peer in proposal.working}, now)
        members.arrange(proposal.layouts)
        for peer, seat in seats.items():
            members.volunteers[peer].cluster, members.volunteers[peer].place = seat
        for peer in sorted(before.keys() - seats.keys()):
            members.settle(members.volunteers[peer])  # it came after the proposal was made
        for peer in sorted(before):
            volunteer = members.volunteers[peer]
            backup, moves = peer in members.backups, volunteer.place != before[peer]
            if moves:
                volunteer.computing, volunteer.links = 0.0, {}  # they were measured on the other blocks
                volunteer.warm = None
            if moves or (backup and peer not in spared):
                if not moves and volunteer.life_cycle is LifeCycle.READY and volunteer.digests:
                    volunteer.warm = self._context.history.version, volunteer.digests
                volunteer.rejoin()
                volunteer.digests, volunteer.witness, volunteer.missed = {}, False, 0
                effects.append(Send(peer, granted(self._context, volunteer)))
        return effects


def granted(context: CoordinatorContext, volunteer: VolunteerState) -> m.Granted:
    """Message that gives `volunteer` its place."""
    begin, end = volunteer.place or (0, 0)
    backup = volunteer.peer in context.members.backups
    return m.Granted(line=context.line, begin=begin, end=end, backup=backup)
