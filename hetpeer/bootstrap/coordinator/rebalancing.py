"""Another division of the blocks while the run goes on: what a planner proposes, and how it comes into effect.

Pure. Volunteers that get other blocks lose what they hold, so they are moved only while the current version lies complete in the
checkpoint store: whatever happens meanwhile, everybody can have it there (docs/planning.md, "A plan that lives").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.checkpoint_collection import CheckpointCollection
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect, Send
from hetpeer.bootstrap.state.membership import Range

RESTS = 10
"""After a wait for a checkpoint that was not complete in time, so many such waits pass before the next; then twice as many."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Who has which place from now on: `layouts[c]` is cluster c's cut of all blocks, `seats` peer → its cluster and blocks there."""

    layouts: Sequence[Sequence[Range]]
    seats: Mapping[str, tuple[int, Range]]

    def fault(self, blocks: int) -> str | None:
        """What is wrong with it for a model of so many blocks."""
        for cluster, layout in enumerate(self.layouts):
            borders = [0, *(end for _, end in layout)]
            if list(layout) != list(pairwise(borders)) or borders[-1] != blocks or not _rises(borders):
                return f"cluster {cluster} does not cut {blocks} blocks"
        taken = list(self.seats.values())
        if len(set(taken)) < len(taken):
            return "two volunteers have one place"
        for peer, (cluster, place) in self.seats.items():
            if not 0 <= cluster < len(self.layouts) or place not in self.layouts[cluster]:
                return f"{peer} has a place that no cluster has"
        return None


def _rises(borders: Sequence[int]) -> bool:
    return all(one < other for one, other in pairwise(borders))


class Rebalancing:
    """At most one proposal waits; it is void once anybody came or left, or the checkpoint that it waits for failed or takes too long."""

    def __init__(self, context: CoordinatorContext, saving: CheckpointCollection) -> None:
        self._context = context
        self._checkpoints = saving
        self._proposal: Arrangement | None = None
        self._failures = 0
        """Of checkpoints, before it was made."""
        self._until: float | None = None
        """So long the run stands still for the checkpoint."""
        self._rest_s = RESTS * context.config.sync_s
        self._not_before = 0.0
        """No proposal is taken before: the last one made the run stand still in vain."""

    def propose(self, arrangement: Arrangement, now: float) -> bool:
        """Whether it can come into effect as things are. Raises `ValueError` for one that is none."""
        if fault := arrangement.fault(self._context.members.blocks):
            raise ValueError(fault)
        if now < self._not_before:
            return False
        self._until = self._until if self.pending else None
        self._proposal, self._failures = arrangement, self._checkpoints.failures
        return self.pending

    def void(self) -> None:
        """Somebody leaves: it was made for others."""
        self._proposal = None

    @property
    def pending(self) -> bool:
        """Whether a proposal waits for the current version to be stored."""
        proposal = self._proposal
        if proposal is None:
            return False
        present = {v.peer for v in self._context.members.volunteers.values() if v.place is not None}
        if proposal.seats.keys() != present or self._checkpoints.failures != self._failures:
            self._proposal = None
        return self._proposal is not None

    def waits(self, now: float) -> bool:
        """At a border: whether the run stands still until the checkpoint is complete. Not longer than it would for a newcomer."""
        if not (self.pending and self._checkpoints.under_way):
            return False
        if self._until is None:
            self._until = now + self._context.config.sync_s
        if now > self._until:
            self._proposal, self._not_before = None, now + self._rest_s
            self._rest_s *= 2
        return self._proposal is not None

    def enact(self) -> list[Effect]:
        """Everybody has the place that the proposal says; who gets other blocks is told."""
        assert self._proposal is not None
        assert self._context.stored
        proposal, self._proposal = self._proposal, None
        self._rest_s = RESTS * self._context.config.sync_s
        members = self._context.members
        effects: list[Effect] = [
            self._context.log(
                kind="arranged", layouts=[[list(place) for place in layout] for layout in proposal.layouts]
            )
        ]
        members.arrange(proposal.layouts)
        for peer, (cluster, place) in sorted(proposal.seats.items()):
            volunteer = members.volunteers[peer]
            volunteer.cluster = cluster
            if place == volunteer.place:
                continue
            volunteer.place = place
            volunteer.rejoin()
            volunteer.digests, volunteer.witness, volunteer.missed = {}, False, 0
            volunteer.computing, volunteer.links = 0.0, {}  # they were those of the other blocks
            granted = m.Granted(line=self._context.line, begin=place[0], end=place[1])
            effects.append(Send(peer, granted))
        return effects
