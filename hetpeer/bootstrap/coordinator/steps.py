"""The steps under way: one, or some more that have begun before the one that they follow is committed (docs/asynchronous.md).

Pure. How one of them goes is step.py's; what becomes of the run is the coordinator's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.commits import given_up
from hetpeer.bootstrap.coordinator.step import CoordinatedStep
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect, NextStep, Send
from hetpeer.bootstrap.state.timeouts import AdaptiveTimeouts


class StepQueue:
    """Those of one reign, in their order: the first is the next to be committed."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._steps: list[CoordinatedStep] = []
        self.timeouts = AdaptiveTimeouts()
        """How patient to be with them."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def first(self) -> CoordinatedStep:
        """The next to be committed. Raises `IndexError` if there is none."""
        return self._steps[0]

    @property
    def fresh(self) -> CoordinatedStep | None:
        """The step under way, if it is the only one and is computed with the current version: newcomers can come into it."""
        alone = self._steps[0] if len(self._steps) == 1 else None
        return None if alone is None or alone.behind else alone

    def numbered(self, number: int | None) -> CoordinatedStep | None:
        """The step that has this number."""
        return next((step for step in self._steps if step.number == number), None)

    # ── they begin and end ──────────────────────────────────────────────────────────────────────────────────

    def open(self, work: NextStep, now: float) -> list[Effect]:
        """A step begins, beside those under way if there are any."""
        step = CoordinatedStep(self._context, work, self.timeouts, now, behind=len(self._steps))
        self._steps.append(step)
        return step.begin()

    @property
    def may_overlap(self) -> bool:
        """Whether the next one may begin before the first is committed."""
        return 0 < len(self._steps) <= self._context.config.staleness

    def overlap(self, now: float) -> list[Effect]:
        """The next ones begin, as far as their staleness allows."""
        effects: list[Effect] = []
        while self.may_overlap and (work := self._context.agenda.take(len(self._steps))) is not None:
            effects += self.open(work, now)
        return effects

    def committed(self, step: CoordinatedStep) -> None:
        """`step` is done, and all went well."""
        self.timeouts.committed()
        self._context.disputed_pairs.committed()
        self._context.failures.committed(step.batch)
        self._context.issue_limits.judge(step.taken, step.counted(), len(step.ledger.ids))
        self._context.late_work.committed(step.number, step.roster, step.ledger.ids)
        self._steps.remove(step)

    def remove(self, step: CoordinatedStep) -> None:
        """`step` is done: it has looked at the state, and changed nothing."""
        self._context.failures.committed(step.batch)
        self._steps.remove(step)

    def clear(self) -> dict[str, Any]:
        """None of them is to be committed: what the log's record of that says of them."""
        trained = [step for step in self._steps if step.ledger.ids]
        self._steps.clear()
        return {"given_up": [given_up(step) for step in trained]} if trained else {}

    def tick(self, now: float) -> list[Effect]:
        """Only the first is waited for: the others' work comes after its. Where it stands still, and what was handed out again did not
        help, theirs may be what holds it up at some holder (its window, its memory), and is handed out again, too.
        """
        first, *younger = self._steps
        if not first.is_overdue(now):
            return first.tick(now)
        self.timeouts.ran_out()
        stuck = [first, *younger] if first.stalls else [first]
        return [effect for step in stuck for effect in step.again(now)]

    def part(self, peer: str, others: Iterable[str]) -> list[Effect]:
        """Nothing passes between `peer` and these `others` any more, in none of them."""
        return [effect for step in self._steps for other in others for effect in step.part(peer, other)]

    # ── volunteers leave ────────────────────────────────────────────────────────────────────────────────────

    @property
    def orphaned(self) -> list[int]:
        """Blocks that nobody holds in some step."""
        return sorted({block for step in self._steps for block in step.orphaned})

    def leave(self, peers: Sequence[str]) -> dict[int, list[str]]:
        """Strike `peers` off the rosters. Returns step → those who were on it."""
        return {step.number: step.leave(peers) for step in self._steps}

    def without(self, left: Mapping[int, Sequence[str]], now: float) -> list[Effect]:
        """The steps go on without those who have `left` them."""
        gone = m.Gone(line=self._context.line, peers=_once(peer for peers in left.values() for peer in peers))
        others = sorted({peer for step in self._steps for peer in step.roster})
        effects: list[Effect] = [Send(peer, gone) for peer in others]
        for step in self._steps:
            if left[step.number]:
                effects += step.without(left[step.number], now)
        return effects


def _once(peers: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(peers))
