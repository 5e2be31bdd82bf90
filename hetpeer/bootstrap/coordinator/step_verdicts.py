"""Verdicts on a step: consequences that its reports have for its volunteers and for the run.

Pure. The gravest report counts: a reduce that cannot end, a microbatch that nobody computes, volunteers to be
fenced, findings of spot checks. The machine carries the verdict out (machine.py).

The coordinator computes a microbatch itself that all holders of a block have failed. If it cannot either, the
sample is bad: it is left out, or the run ends. If it can, the holders make room for others, until enough of
them have failed it (state/failed_microbatches.py; docs/trust.md, "What cannot be computed").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hetpeer.bootstrap.coordinator.commits import ban_records, check_findings, dispute_records
from hetpeer.bootstrap.coordinator.run_policy import RunPolicy
from hetpeer.bootstrap.coordinator.step import CoordinatedStep
from hetpeer.bootstrap.log.record_text import bad_sample_text
from hetpeer.bootstrap.state.backups import needed_backups
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import BadSample, Effect, TryMicrobatch
from hetpeer.bootstrap.state.failed_microbatches import FailedMicrobatch, room_s

MOST = 200
"""Characters of each text in a `bad_sample` record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """Consequence of the reports. Without any but `effects` the step goes on, or is decided."""

    effects: tuple[Effect, ...] = ()
    """Effects that come first: records, and work that is handed out again."""
    halt: str | None = None
    """Reason for which the run ends."""
    fenced: Mapping[str, str] = field(default_factory=dict)
    """Volunteers to be fenced → reason."""
    anew: str = ""
    """Reason for which the steps under way begin anew; empty: they do not."""
    waits: bool = False
    """Whether the coordinator computes a microbatch itself, and nothing follows before that is done."""


class StepVerdicts:
    """The verdicts of one term."""

    def __init__(self, context: CoordinatorContext, policy: RunPolicy) -> None:
        self._context = context
        self._policy = policy

    def judge(self, step: CoordinatedStep, now: float) -> StepVerdict:
        """Log the disputes of `step`, and decide what its gravest report leads to."""
        disputes = tuple(dispute_records(self._context, step))
        verdict = self._gravest(step, now)
        return replace(verdict, effects=disputes + verdict.effects)

    def _gravest(self, step: CoordinatedStep, now: float) -> StepVerdict:
        context = self._context
        if (trouble := step.reduction.trouble) is not None:
            return StepVerdict(halt=trouble)
        if (failure := step.failures.take()) is not None:
            return self._cannot_compute(step, failure, now)
        if (why := step.nothing_left) is not None:
            return StepVerdict(halt=why)
        if out := step.reduction.to_fence():
            return StepVerdict(effects=tuple(ban_records(context, step.number, out)), fenced=out)
        found = check_findings(context, step)
        here = {peer: why for peer, why in found.out.items() if peer in context.members.volunteers}
        return StepVerdict(effects=tuple(found.logged), fenced=here, anew=found.anew)

    def _cannot_compute(self, step: CoordinatedStep, failure: FailedMicrobatch, now: float) -> StepVerdict:
        """Every holder of some block failed a microbatch: we try it, then others do before the run ends."""
        context = self._context
        if (known := context.history.bad.get(step.samples.bad_key(failure.id))) is not None:
            return self._leave_out(step, failure.id, known, now)
        if step.failures.begins_trial(failure):
            trial = TryMicrobatch(context.line.cluster, failure.batch, failure.id)
            return StepVerdict(effects=(trial,), waits=True)
        if step.failures.awaits_trial(failure.id):
            return StepVerdict(waits=True)
        for peer in failure.holders:
            context.members.volunteers[peer].slow = True
        replaceable = context.members.spare() is not None or bool(
            needed_backups(context.members, context.history.version)
        )
        if context.failures.are_final(failure, room_s(context.config), now, replaceable=replaceable):
            return StepVerdict(halt=failure.why)
        self._policy.rest(failure.holders, now)
        return StepVerdict(fenced=dict.fromkeys(failure.holders, failure.why))

    def tried(
        self, step: CoordinatedStep, trial: TryMicrobatch, bad: BadSample | None, now: float
    ) -> StepVerdict:
        """We have computed a microbatch of `step` ourselves; `bad`: nobody can, so it is left out."""
        if bad is None:
            step.failures.tried(trial.id)
            return self.judge(step, now)
        batch, _ = step.samples.bad_key(trial.id)
        record = self._context.log(
            kind="bad_sample",
            batch=batch,
            id=trial.id,
            step=step.number,
            where=bad.where[:MOST],
            why=bad.why[:MOST],
            skipped=self._context.config.skips,
        )
        verdict = self._leave_out(step, trial.id, record.record, now)
        return replace(verdict, effects=(record, *verdict.effects))

    def _leave_out(
        self, step: CoordinatedStep, microbatch: int, known: Mapping[str, Any], now: float
    ) -> StepVerdict:
        """Skip a microbatch that nobody can compute, or end the run; `known`: the record that says so."""
        if not self._context.config.skips:
            return StepVerdict(halt=bad_sample_text(known))
        skipped = step.skip(microbatch, now)
        verdict = self.judge(step, now)
        return replace(verdict, effects=(*skipped, *verdict.effects))
