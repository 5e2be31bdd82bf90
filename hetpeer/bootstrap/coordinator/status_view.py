"""A reign as it is seen from outside: what `status` shows, and the events that need no decision.

Pure. The decisions are in coordinator.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.checkpoint_collection import CheckpointCollection
from hetpeer.bootstrap.coordinator.steps import StepQueue
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.state.agenda import SequentialAgenda
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import CollectCheckpoint, CoordinatorConfig, CoordinatorState, Effect
from hetpeer.bootstrap.state.leases import Leases
from hetpeer.bootstrap.state.membership import Membership
from hetpeer.bootstrap.trust.state_agreement import StateAgreement


def over_all(config: CoordinatorConfig, history: History) -> CoordinatorContext:
    """A new reign over a run with one history, whose batches are trained in order."""
    line = m.Line(term=history.term + 1, view=history.view)
    arranged = [[(begin, end) for begin, end in layout] for layout in history.arranged]
    members = Membership(config.layouts, config.costs, history.departures, arranged=arranged)
    return CoordinatorContext(config, history, SequentialAgenda(config, history), line, members)


class Reigning:
    """A new reign, before anything has happened in it."""

    def __init__(self, context: CoordinatorContext, now: float) -> None:
        self._context = context
        self._leases = Leases(self._context, now)
        self._agreement = StateAgreement(self._context)
        self._checkpoints = CheckpointCollection(self._context, self._agreement)
        self._steps = StepQueue(self._context)

    @property
    def state(self) -> CoordinatorState:
        return self._context.state

    @property
    def members(self) -> Membership:
        return self._context.members

    @property
    def history(self) -> History:
        return self._context.history

    @property
    def line(self) -> m.Line:
        return self._context.line

    @property
    def step(self) -> int | None:
        """The step in progress, the oldest of them."""
        return self._steps.first.number if self._steps else None

    @property
    def volunteers(self) -> int:
        return len(self.members.volunteers)

    @property
    def done(self) -> int:
        return self.history.version

    @property
    def last(self) -> list[Mapping[str, Any]]:
        commit = self.history.commits.get(self.history.version - 1)
        return [] if commit is None else [commit]

    def working(self) -> dict[str, m.Range]:
        """Everybody who holds the current version, with the blocks."""
        return self.members.roster()

    @property
    def missing_blocks(self) -> Sequence[int]:
        """Blocks without a ready holder: what the run waits for."""
        return self.members.uncovered()

    def start(self) -> list[Effect]:
        """The first effects of a reign: its term is durable before anything is said in its name."""
        return [self._context.log(kind="reign", term=self.line.term)]

    def broken(self, peer: str, now: float) -> list[Effect]:
        """The stream of `peer` broke; it may come back within the grace."""
        self._leases.broken(peer, now)
        return []

    def resumed(self, peer: str, now: float) -> list[Effect]:
        """The stream of `peer` is back and nothing was lost on the way."""
        self._leases.heard(peer, now)
        return []

    def not_saved(self, order: CollectCheckpoint, _now: float) -> list[Effect]:
        """The checkpoint that `order` asks for could not be collected: it is tried again at the next border."""
        self._checkpoints.failed(order)
        return []
