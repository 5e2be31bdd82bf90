"""Sums of a step's gradients in the order that the logs name."""

from __future__ import annotations

from torch import Tensor

from hetpeer.bootstrap.log.evidence import FoldingOrder
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.worker.holding.held_block import HeldBlock
from hetpeer.stages.worker.microbatch_tasks import Gradients


class Folding:
    """The sums of one block in one step, in the order `order`."""

    def __init__(self, held: HeldBlock, step: int, order: FoldingOrder) -> None:
        self._held = held
        self._step = step
        self._slots = [[list(run) for run in runs] for _, runs in order]
        runs = [run for slot in self._slots for run in slot]
        self._place = {microbatch: number for number, run in enumerate(runs) for microbatch in run}
        self._runs: list[list[int]] = runs
        self._waiting: dict[int, tuple[Gradients, Pass]] = {}

    def add(self, microbatch: int, gradients: Gradients, here: Pass) -> None:
        """Add `microbatch` to its run, or keep it until those before it are there."""
        self._waiting[microbatch] = gradients, here
        number = self._place[microbatch]
        run = self._runs[number]
        while run and run[0] in self._waiting:
            parts, passed = self._waiting.pop(run.pop(0))
            self._held.fold(self._step, number, self._held.room(self._step, number), parts, passed)

    def total(self) -> Tensor:
        """The sum of all slots, each the sum of its runs."""
        number = 0
        sums: list[Tensor] = []
        for slot in self._slots:
            first = number
            for other in range(first + 1, first + len(slot)):
                self._held.merge_slot(self._step, other, first)
            sums.append(self._held.slot(self._step, first).whole())
            number += len(slot)
        for part in sums[1:]:
            sums[0].add_(part)
        return sums[0]
