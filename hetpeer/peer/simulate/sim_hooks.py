"""Seams of a simulated swarm: an observer of its history, and the conduct of each volunteer.

`hetpeer simulate` uses the classes as they stand here: nobody observes, and every volunteer is honest. Tests
derive from them to check invariants, count what was reached, inject faults and tell lies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.gradient_slots import GradientSlots

if TYPE_CHECKING:
    from hetpeer.peer.simulate.sim_volunteer import SimVolunteer

UNUSABLE = "unusable"
"""Stands for a part or a sum of numbers that cannot be added: not finite, or too few."""


class ViolationError(AssertionError):
    """A simulated history broke an invariant; the message says which and where."""


class SimObserver:
    """Hears what happens in a history, while it happens. Any method may raise `ViolationError`.

    Example: a subclass whose `recorded` counts commits, given to `SimSwarm(..., observer=...)`.
    """

    # ── the coordinator ─────────────────────────────────────────────────────────────────────────────────────

    def coordinator_event(self, state: str, event: str) -> None:
        """`event` reaches the coordinator's core in `state`."""

    def recorded(self, record: Mapping[str, Any]) -> None:
        """One more record lies durably in the log."""

    def planned(self, roster: Collection[str], plan: m.Plan) -> None:
        """The coordinator sends `plan`; `roster`: volunteers that work for it now."""

    def committed(self, volunteer: str, *, holds: bool) -> None:
        """`volunteer` is told the commit of its step; `holds`: it has the gradients that the commit names."""

    def ended(self, states: Mapping[int, Any]) -> None:
        """The run is complete; `states`: block → state, of the last checkpoint."""

    # ── the volunteers ──────────────────────────────────────────────────────────────────────────────────────

    def member_message(self, phase: str, kind: str) -> None:
        """A message of `kind` reaches a volunteer's core in `phase`."""

    def plan_arrived(self, volunteer: str, slots: GradientSlots, plan: m.Plan) -> None:
        """`volunteer` is told the plan of its step."""

    def folding(self, volunteer: str, slots: GradientSlots, blocks: range) -> None:
        """A backward starts; its gradients are to be folded into a slot."""

    def applied(self, volunteer: str, record: e.RecordApplied, before: Mapping[int, str]) -> None:
        """`volunteer` has applied an update; `before`: block → digest of the state that it was applied to."""

    def keeps(self, volunteer: str, versions: int, steps: int) -> None:
        """Note that `volunteer` keeps at most `versions` of a block and works on at most `steps` at once."""


class SimConduct:
    """Conduct of one process of a volunteer. Each method passes on what it is given: that is honesty.

    Spot checks are not answered here: `hetpeer simulate` has none.
    """

    # ── computing ───────────────────────────────────────────────────────────────────────────────────────────

    def computation_fails(self, mark: int) -> bool:  # noqa: ARG002
        """Whether this work fails: the forward of id i has the mark 2i, its backward 2i + 1."""
        return False

    def failures(self, step: e.StepId) -> Sequence[e.Tell]:  # noqa: ARG002
        """Failures that are reported after each forward."""
        return ()

    def used(
        self, step: e.StepId, key: p.TaskKey, border: int, sender: str, bundle: Any, *, back: bool = False
    ) -> None:
        """`key` is computed from `bundle`, which came from `sender` at `border`; `back`: it is a gradient."""

    def state_made(self, state: Any) -> Any:
        """State that the volunteer keeps after an update to `state`."""
        return state

    def applies_at_once(self) -> bool:
        """Whether an update takes no time here, and is not shown to the observer."""
        return False

    def state_saved(self, state: Any) -> Any:
        """State that the volunteer gives for a checkpoint in place of `state`."""
        return state

    # ── sending ─────────────────────────────────────────────────────────────────────────────────────────────

    def bundle_sent(self, sent: p.SendActivation | p.SendGradient, value: Any) -> Any:  # noqa: ARG002
        """The bundle that the other volunteer receives; a liar returns another one than `value`."""
        return value

    def sends_parts(self) -> bool:
        """Whether the volunteer sends its parts of a reduce."""
        return True

    def part_sent(self, value: Any, step: e.StepId, work: e.SendPart) -> Any:  # noqa: ARG002
        """The part that the reducer receives."""
        return value

    def sends_result(self, to: str) -> bool:  # noqa: ARG002
        """Whether `to` gets the sums that are made here."""
        return True

    def result_sent(self, to: str, value: Any) -> Any:  # noqa: ARG002
        """The sum that `to` receives."""
        return value

    # ── reducing ────────────────────────────────────────────────────────────────────────────────────────────

    def squared_lengths(self, step: e.StepId, work: e.SumParts, parts: Sequence[Any]) -> Sequence[float]:  # noqa: ARG002
        """`parts` are about to be added here. Returns their squared lengths; none if nobody asks for them."""
        return ()

    def objects(self, work: e.SumParts) -> int | None:  # noqa: ARG002
        """Index of a part that is said to be unusable."""
        return None

    def sum_made(self, value: Any, *, exact: bool) -> Any:  # noqa: ARG002
        """The sum that this volunteer made; `exact`: of gradients."""
        return value

    def voted(
        self,
        step: int,  # noqa: ARG002
        vote: m.BlockVote,
        looks: Sequence[e.Look],
    ) -> tuple[m.BlockVote, Sequence[e.Look]]:
        """The vote that is sent, and the inspections of the sums that arrived."""
        return vote, looks

    # ── words ───────────────────────────────────────────────────────────────────────────────────────────────

    def says(self, message: m.Message) -> bool:  # noqa: ARG002
        """Whether `message` is sent to the coordinator."""
        return True

    def said(self, message: m.Message) -> None:
        """Note that the core has ordered `message` to be sent."""

    def fetches_states(self) -> bool:
        """Whether the volunteer fetches the states that it is told to fetch."""
        return True

    def answer(
        self, step: e.StepId, asked: p.CompareBundle | e.ShowMarks | e.ProveSums | e.TestifyParts
    ) -> None:
        """Answer a question of a spot check or a sum proof."""
        raise AssertionError(f"nobody answers {asked} in step {step}")

    def step_over(self, step: e.StepId) -> None:
        """Forget `step`: nobody asks about it any more."""


ConductOf = Callable[["SimVolunteer"], SimConduct]
"""Makes the conduct of a fresh process of a volunteer; its tensors and its worker exist already."""


def honest(_volunteer: SimVolunteer) -> SimConduct:
    """Conduct of every volunteer in `hetpeer simulate`."""
    return SimConduct()
