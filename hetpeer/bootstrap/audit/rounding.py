"""Bounds for another processor: how far rounding carries two machines apart that begin with the same state.

Two processors that round differently soon train different models, since training amplifies differences. So a
segment begins with the run's own state at a checkpoint: nothing has been amplified before. How far rounding
carries machines apart within the segment is measured: it is computed twice, the second time as on a processor
of another kind: by other kernels, by operators in float64 that round once, and adding in another order. The
run is a third such machine. It may be ROOM times as far away as those two are from each other.

At high learning rates a segment may depend on a single sign that rounding decides, and two computations out
of three have the same. So a segment that is farther away is computed a few times more, with noise of ROOM
roundings on the parameters of each step. The run may be NOISE_ROOM times as far away as the farthest of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hetpeer.bootstrap.audit.replay_script import Difference, ReplayStep, Segment
from hetpeer.bootstrap.storage.checkpoints import CheckpointStore
from hetpeer.dht.base.file_pieces import FilePart
from hetpeer.stages.block.block_state import BlockState, Layout
from hetpeer.stages.block.rounding import ROOM, UNIT
from hetpeer.stages.block.state_file import StateFile

OTHER_KERNELS: Mapping[str, str] = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}
"""Environment in which torch's libraries compute as on a processor without wide vectors."""

NOISE_ROOM = 4.0
"""As ROOM, for computations with noise that is by itself ROOM roundings large."""

Result = Mapping[str, Any]
"""A line of one_machine.py."""


@dataclass(frozen=True, slots=True)
class Computation:
    """One computation of a segment by one_machine.py."""

    results: Sequence[Result]
    states: Path
    """Folder with the states at the segment's end."""
    room: float = ROOM
    """The run may be so many times as far away from this machine as this computation is."""


@dataclass(slots=True)
class Agreement:
    """Comparison of a segment of the run with this machine."""

    steps: int = 0
    """Steps whose loss and norm are as near as rounding allows."""
    evaluations: int = 0
    farthest: float = 0.0
    """Largest relative difference of the run's numbers from this machine's."""
    bound: float = 0.0
    """Largest relative difference that was allowed."""
    difference: Difference | None = None
    """The first number that is too far away."""


def compare_numbers(segment: Segment, own: Computation, others: Sequence[Computation]) -> Agreement:
    """Compare losses, norms of blocks and norms of the run with this machine's `own`, in order.

    `others` make the bounds. If there are none, differences are measured, and nothing is judged.
    """
    found, spread = Agreement(), Spread()
    steps = {one.step: one for one in segment.steps}
    for index, ours in enumerate(own.results):
        for other in others:
            spread.widen(ours, other.results[index], other.room)
        if "evaluation" in ours:
            step = ours["evaluation"]
            numbers = [Number("held-out loss", segment.evaluations[step], ours["loss"], spread.loss)]
            found.evaluations += 1
        else:
            step = ours["step"]
            numbers = _numbers_of(steps[step], ours, spread)
            found.steps += 1
        for one in numbers:
            if not one.blocks:
                found.farthest = max(found.farthest, one.off)
                found.bound = max(found.bound, one.bound if others else 0.0)
            if others and not one.off <= one.bound:
                found.difference = one.difference(step, steps.get(step))
                return found
    return found


def _numbers_of(step: ReplayStep, ours: Result, spread: Spread) -> list[Number]:
    """Norms of blocks, the one that is farthest beyond its bound first; then loss and norm of all."""
    own = list(map(math.sqrt, ours["squares"]))
    blocks = [
        Number("norm", math.sqrt(square), own[block], spread.blocks.get(block, 0.0), (block,))
        for block, square in enumerate(step.squares)
    ]
    return [
        *sorted(blocks, key=lambda one: -one.off / one.bound),
        Number("loss", step.loss, ours["loss"], spread.loss),
        Number("norm", step.norm, ours["norm"], spread.norm),
    ]


@dataclass(slots=True)
class Spread:
    """Bounds on relative differences in a segment, by what two computations of it differed; they only grow.

    Two losses or norms may be equal by accident. So microbatches' losses are compared one by one, and a norm
    is as far as the vectors are.
    """

    loss: float = 0.0
    norm: float = 0.0
    blocks: dict[int, float] = field(default_factory=dict)
    """Block → bound on the norm of its gradient."""

    def widen(self, ours: Result, theirs: Result, room: float) -> None:
        """Take in the same step, or evaluation, of both; the run may be `room` times as far away."""
        pairs = list(zip(ours["losses"], theirs["losses"], strict=True))
        apart = math.fsum(abs(one - other) for one, other in pairs) / len(pairs)
        self.loss = max(self.loss, room * _ratio(apart, abs(ours["loss"])))
        if "evaluation" in ours:
            return
        squares = []
        for block, (one, other) in enumerate(zip(ours["sketches"], theirs["sketches"], strict=True)):
            apart = float(np.linalg.norm(_sketched(one) - _sketched(other)))
            squares.append(apart * apart)
            bound = room * _ratio(apart, math.sqrt(ours["squares"][block]))
            self.blocks[block] = max(self.blocks.get(block, 0.0), bound)
        self.norm = max(self.norm, room * _ratio(math.sqrt(math.fsum(squares)), ours["norm"]))


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the run beside this machine's `own`."""

    what: str
    run: float
    own: float
    spread: float
    """Largest relative difference by what was measured."""
    blocks: tuple[int, ...] = ()

    @property
    def off(self) -> float:
        """Relative difference."""
        return _ratio(abs(self.run - self.own), abs(self.own))

    @property
    def bound(self) -> float:
        """Largest relative difference that is allowed."""
        return max(self.spread, ROOM * UNIT)

    def difference(self, step: int, script: ReplayStep | None) -> Difference:
        """The difference to report if it is too far away."""
        holders = sorted({peer for block in self.blocks if script for peer in script.blocks[block].holders})
        return Difference(
            step=step,
            what=self.what,
            blocks=self.blocks,
            holders=tuple(holders),
            off=self.off,
            bound=self.bound,
        )


def compare_states(
    segment: Segment,
    store: CheckpointStore,
    layouts: Sequence[Layout],
    own: Computation,
    others: Sequence[Computation],
) -> Difference | None:
    """The first vector of the checkpoint at the segment's end that is too far away (2-norm, relative)."""
    if segment.end is None:
        return None
    for block, layout in enumerate(layouts):
        run = store.load_state(segment.end, block)
        ours = _load(own.states, block, layout, run)
        theirs = [_load(other.states, block, layout, run) for other in others]
        for name, vector in ours.items():
            length = float(np.linalg.norm(vector)) or 1.0
            allowed = [
                other.room * float(np.linalg.norm(vectors[name] - vector)) / length
                for other, vectors in zip(others, theirs, strict=True)
            ]
            bound = max(*allowed, ROOM * UNIT)
            kept = run.vectors().get(name, np.zeros_like(run.parameters)).astype(np.float64)
            off = float(np.linalg.norm(kept - vector)) / length
            if not off <= bound:
                what = f"{name or 'parameters'} of the checkpoint"
                step = int(segment.end["version"]) - 1
                return Difference(step=step, what=what, blocks=(block,), off=off, bound=bound)
    return None


def _load(folder: Path, block: int, layout: Layout, run: BlockState) -> dict[str, Any]:
    """Name → vector in float64, of a state that one_machine.py has saved."""
    kept = sorted(run.optimizer)
    state = StateFile(FilePart.whole(folder / f"block-{block}.safetensors"), block, layout, kept).state()
    zeros = np.zeros_like(state.parameters)
    vectors = state.vectors()
    return {name: vectors.get(name, zeros).astype(np.float64) for name in ("", *kept)}


def _sketched(sketch: str) -> Any:
    """The numbers of a sketch (one_machine.py), float64."""
    return np.frombuffer(bytes.fromhex(sketch), "<f4").astype(np.float64)


def _ratio(apart: float, length: float) -> float:
    """Relative difference; NaN if one of them is."""
    return apart / max(length, 1e-30)
