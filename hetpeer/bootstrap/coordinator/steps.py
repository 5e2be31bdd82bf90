"""Steps under way: the next to be committed, and those that overlap with it (docs/asynchronous.md).

Pure. step.py runs each of them; machine.py decides what becomes of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.commits import given_up
from hetpeer.bootstrap.coordinator.step import CoordinatedStep
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect, NextStep, Send, TryMicrobatch
from hetpeer.bootstrap.state.timeouts import AdaptiveTimeouts
from hetpeer.bootstrap.state.volunteer_state import VolunteerState


class StepQueue:
    """Steps of one term in order: the first is the next to be committed."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._steps: list[CoordinatedStep] = []
        self.mean: int | None = None
        """Number of the mean that is to be installed among the steps, by their order; None: there is none."""
        self.timeouts = AdaptiveTimeouts()
        """Timeouts of the steps, which adapt to this swarm."""

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[CoordinatedStep]:
        return iter(self._steps)

    @property
    def first(self) -> CoordinatedStep:
        """The next to be committed. Raises `IndexError` if there is none."""
        return self._steps[0]

    @property
    def fresh(self) -> CoordinatedStep | None:
        """The step under way, if it is alone and uses the current version: late joiners can enter it."""
        alone = self._steps[0] if len(self._steps) == 1 else None
        return None if alone is None or alone.behind else alone

    @property
    def mean_is_next(self) -> bool:
        """Whether a mean is to be installed before the first step is committed."""
        return self.mean is not None and self.mean == self._context.history.version

    def numbered(self, number: int | None) -> CoordinatedStep | None:
        """The step with this number."""
        return next((step for step in self._steps if step.number == number), None)

    def awaiting(self, trial: TryMicrobatch) -> CoordinatedStep | None:
        """The step that waits for the result of `trial`."""
        known = (step for step in self._steps if step.batch == trial.batch)
        return next((step for step in known if step.failures.awaits_trial(trial.id)), None)

    # ── they begin and end ──────────────────────────────────────────────────────────────────────────────────

    def open(self, work: NextStep, now: float, coming: Sequence[VolunteerState] = ()) -> list[Effect]:
        """Begin a step, beside those under way if there are any; `coming` as in `CoordinatedStep`."""
        version = self._context.history.version
        taken = [step.number for step in self._steps] + ([] if self.mean is None else [self.mean])
        number = max(taken, default=version - 1) + 1
        if work.after_mean:
            self.mean = number
            number += 1
        step = CoordinatedStep(
            self._context, work, self.timeouts, now, behind=number - version, mean=self.mean, coming=coming
        )
        self._steps.append(step)
        return step.begin()

    def installed(self) -> None:
        """Note that the mean is installed."""
        self.mean = None

    @property
    def may_overlap(self) -> bool:
        """Whether the next step may begin before the first is committed."""
        return 0 < len(self._steps) <= self._context.config.staleness

    def overlap(self, now: float) -> list[Effect]:
        """Begin the next steps, as far as their staleness allows."""
        effects: list[Effect] = []
        while self.may_overlap and (work := self._context.agenda.take(len(self._steps))) is not None:
            effects += self.open(work, now)
        return effects

    def committed(self, step: CoordinatedStep) -> None:
        """Remove `step`, which is committed, and note that all went well."""
        self.timeouts.committed()
        self._context.disputed_pairs.committed()
        self._context.failures.committed(step.batch)
        self._context.issue_limits.judge(step.blamed(), step.counted(), len(step.ledger.ids))
        self._context.late_work.committed(step.number, step.roster, step.ledger.ids)
        self._steps.remove(step)

    def remove(self, step: CoordinatedStep) -> None:
        """Remove `step`, which has evaluated the state and changed nothing."""
        self._context.failures.committed(step.batch)
        self._steps.remove(step)

    def clear(self) -> dict[str, Any]:
        """Give up all steps. Returns the log fields that say so."""
        trained = [step for step in self._steps if step.ledger.ids]
        self._steps.clear()
        self.mean = None
        return {"given_up": [given_up(step) for step in trained]} if trained else {}

    def tick(self, now: float) -> list[Effect]:
        """Check the timeouts of the first step; the others' work comes after its.

        Where it stands still after its work was handed out again, a younger step's work may block some
        holder's window or memory. Then that is handed out again, too. No step is late for a mean's sake.
        """
        if self.mean_is_next:
            return []
        first, *younger = self._steps
        if not first.is_overdue(now):
            return first.tick(now)
        self.timeouts.ran_out()
        stuck = [first, *younger] if first.stalls else [first]
        return [effect for step in stuck for effect in step.again(now)]

    def part(self, peer: str, others: Iterable[str]) -> list[Effect]:
        """Nothing passes between `peer` and `others` any more, in none of the steps."""
        return [effect for step in self._steps for other in others for effect in step.part(peer, other)]

    # ── volunteers leave ────────────────────────────────────────────────────────────────────────────────────

    @property
    def orphaned(self) -> list[int]:
        """Blocks that nobody holds in at least one step."""
        return sorted({block for step in self._steps for block in step.orphaned})

    def leave(self, peers: Sequence[str]) -> dict[int, list[str]]:
        """Strike `peers` off the rosters. Returns step → its former members among them."""
        return {step.number: step.leave(peers) for step in self._steps}

    def without(self, left: Mapping[int, Sequence[str]], now: float) -> list[Effect]:
        """Go on without the volunteers that have `left` (step → peers)."""
        peers = dict.fromkeys(peer for peers in left.values() for peer in peers)
        gone = m.Gone(line=self._context.line, peers=tuple(peers))
        others = sorted({peer for step in self._steps for peer in step.roster})
        effects: list[Effect] = [Send(peer, gone) for peer in others]
        for step in self._steps:
            if left[step.number]:
                effects += step.without(left[step.number], now)
        return effects
