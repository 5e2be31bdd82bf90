"""Decisions that depend on the kind of run: a whole run, or one cluster of a grouped run.

Pure. machine.py, departures.py and rollback.py leave them to a `RunPolicy`. `WholeRun` is the one of a whole
run; bootstrap/grouped/cluster.py has that of a single cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hetpeer.bootstrap.coordinator.step_barrier import StepBarrier
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.failed_microbatches import room_s
from hetpeer.bootstrap.state.volunteer_state import VolunteerState


class RunPolicy(Protocol):
    """Decisions of one kind of run."""

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
