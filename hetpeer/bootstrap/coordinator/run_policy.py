"""Where a coordinator of a whole run and one of a single cluster (bootstrap/grouped/cluster.py) decide
differently. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hetpeer.bootstrap.coordinator.step_barrier import StepBarrier
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.failed_microbatches import room_s
from hetpeer.bootstrap.state.volunteer_state import VolunteerState


class RunPolicy(Protocol):
    """Decisions that the state machine and departures leave to the kind of run."""

    @property
    def whole_run(self) -> bool:
        """Whether the coordinator may roll back, move volunteers and complete the run; otherwise its cluster
        dissolves.
        """

    @property
    def may_begin(self) -> bool:
        """Whether steps may begin at all."""

    @property
    def dissolved(self) -> str | None:
        """Why the cluster has fallen apart; None as long as it has not."""

    def excuse(self, pause_s: float) -> None:
        """The coordinator did not run for `pause_s` seconds: postpone deadlines by that."""

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

    def excuse(self, pause_s: float) -> None:
        """All deadlines are the barrier's."""

    def gap_is_final(self, now: float) -> str | None:
        """The reason once holders had their time to come back and the state is not stored."""
        late = self._barrier.too_late(now)
        return "the holders of the last version did not come back in time" if late else None

    def is_stuck(self, stalls: int, now: float) -> str | None:  # noqa: ARG002
        """Never: its work is handed out again until it is done."""
        return None

    def vacated(self, volunteers: Sequence[VolunteerState]) -> list[int]:  # noqa: ARG002
        """None: late joiners, the checkpoint and moved volunteers come first."""
        return []

    def rest(self, peers: Sequence[str], now: float) -> None:
        """They rest until somebody else could be moved to their blocks."""
        self._context.failures.rest(peers, room_s(self._context.config), now)

    def dissolve(self, why: str, given_up: Mapping[str, Any]) -> None:
        """A whole run rolls back instead."""
