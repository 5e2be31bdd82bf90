"""Simulated volunteers of histories: they may have tied parameters, and average parameters of clusters (mode
`grouped`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hetpeer.averaging import effects as e
from hetpeer.averaging.effects import Effect, StepEffect
from hetpeer.averaging.member.member import Member
from hetpeer.peer.simulate.sim_volunteer import SimVolunteer
from hetpeer.peer.simulate.sim_worker import SimWorker
from hetpeer.stages.pipeline import effects as p
from tests.simulation.checked_symbols import CheckedNumerics


@dataclass(eq=False)
class CheckedWorker(SimWorker):
    """A worker that also ties and averages parameters."""

    _numerics: CheckedNumerics
    _copies: dict[int, Any] = field(default_factory=dict)
    """Block → its state when a delayed averaging began."""

    def clear_step(self, step: e.StepId) -> None:
        if step.group:
            self._change(self._copies.clear)
        else:
            super().clear_step(step)

    def export(self, step: e.StepId, work: e.SendPart, send: Callable[[p.Handle], None]) -> None:
        if work.slot not in (e.STATE, e.COPY):
            super().export(step, work, send)
            return
        shard = work.shard

        def finish(_core: Member) -> Iterable[Effect]:
            kept = work.slot == e.COPY
            held = self._copies[shard.block] if kept else self._state(shard.block, step.number)
            value = self._numerics.parameters(held, shard.begin, shard.end)
            send(self.boxes.new(step, self.conduct.part_sent(value, step, work)))
            return ()

        self.submit(0.0, finish)

    def install(self, step: e.StepId, work: e.InstallAverage) -> None:
        """`InstallAverage` → `applied`."""
        total = self.boxes.value(work.total)

        def after(before: Any) -> Any:
            copy = self._copies.get(work.block, before)
            return self._numerics.install(before, total, work.coefficient, copy)

        self._update(step, work.block, work.version, after, work.needed)

    def inspect(self, step: e.StepId, work: e.Inspect) -> None:
        if not work.tied:
            super().inspect(step, work)
            return
        shards = [self.boxes.value(handle) for handle in work.shards]
        pieces = {
            block: (piece.begin, [self.boxes.value(handle) for handle in piece.shards])
            for block, piece in work.tied.items()
        }

        def gradient() -> Any:
            join = self._numerics.join
            tied = {block: (begin, join(parts)) for block, (begin, parts) in pieces.items()}
            return self._numerics.tie(work.block, join(shards), tied)

        self._vote(step, work, [*shards, *(part for _, own in pieces.values() for part in own)], gradient)

    def keep_copy(self, step: e.StepId, work: e.KeepCopy) -> None:
        """`KeepCopy`: keep the block's state for a delayed averaging."""
        self._change(lambda: self._copies.update({work.block: self._state(work.block, step.number)}))


class CheckedVolunteer(SimVolunteer):
    """A volunteer of a run of either mode."""

    worker_class = CheckedWorker
    worker: CheckedWorker

    def _perform_in_step(self, step: e.StepId, effect: StepEffect) -> None:
        match effect:
            case e.InstallAverage():
                self.worker.install(step, effect)
            case e.KeepCopy():
                self.worker.keep_copy(step, effect)
            case _:
                super()._perform_in_step(step, effect)
