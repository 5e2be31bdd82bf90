"""How far rounding may carry two machines apart that begin with the same state: bounds for another processor.

Two processors that round differently soon train different models, since training amplifies differences. So a
segment begins with the run's own state at a checkpoint: nothing has been amplified before. How far rounding
carries machines apart within the segment is measured: it is computed twice, the second time as on a processor
of another kind: by other kernels, by operators in float64 that round once, and adding in another order. The
run is a third such machine. It may be ROOM times as far away as those two are from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetpeer.bootstrap.audit.replay_script import Difference, Segment
from hetpeer.bootstrap.storage.checkpoints import CheckpointStore
from hetpeer.stages.block import block_state
from hetpeer.stages.block.block_state import BlockState, Layout
from hetpeer.stages.block.rounding import ROOM, UNIT

OTHER_KERNELS: Mapping[str, str] = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}
"""Environment in which torch's libraries compute as on a processor without wide vectors."""

Result = Mapping[str, Any]
"""A line of one_machine.py."""


@dataclass(slots=True)
class Agreement:
    """Comparison of a segment of the run with this machine (`native`) and the same by `other` kernels."""

    steps: int = 0
    """Steps whose loss and norm are as near as rounding allows."""
    evaluations: int = 0
    farthest: float = 0.0
    """Largest relative difference of the run's numbers from this machine's."""
    bound: float = 0.0
    """Largest relative difference that was allowed."""
    difference: Difference | None = None
    """The first number that is too far away."""


def compare_numbers(segment: Segment, native: Sequence[Result], other: Sequence[Result] | None) -> Agreement:
    """Compare losses and norms, in order. `other` None: differences are measured and nothing is judged."""
    found, spread = Agreement(), UNIT
    steps = {one.step: one for one in segment.steps}
    for index, ours in enumerate(native):
        theirs = None if other is None else other[index]
        if "evaluation" in ours:
            step = ours["evaluation"]
            pairs = [("held-out loss", segment.evaluations[step], "loss")]
            found.evaluations += 1
        else:
            step = ours["step"]
            pairs = [("loss", steps[step].loss, "loss"), ("norm", steps[step].norm, "norm")]
            found.steps += 1
        if theirs is not None:
            spread = max(spread, *(_relative(theirs[key], ours[key]) for _, _, key in pairs))
            found.bound = ROOM * spread
        for what, number, key in pairs:
            off = _relative(number, ours[key])
            found.farthest = max(found.farthest, off)
            if other is not None and not off <= found.bound:
                found.difference = Difference(step=step, what=what, off=off, bound=found.bound)
                return found
    return found


def compare_states(
    segment: Segment, store: CheckpointStore, layouts: Sequence[Layout], native: Path, other: Path
) -> Difference | None:
    """The first vector of the checkpoint at the segment's end that is too far away: in the 2-norm, relative.

    `native`, `other`: folders with the states of the two computations.
    """
    if segment.end is None:
        return None
    for block, layout in enumerate(layouts):
        run = store.load_state(segment.end, block)
        ours, theirs = (_load(folder, block, layout, run) for folder in (native, other))
        for name, vector in ours.items():
            length = float(np.linalg.norm(vector)) or 1.0
            spread = max(float(np.linalg.norm(theirs[name] - vector)) / length, UNIT)
            kept = run.vectors().get(name, np.zeros_like(run.parameters)).astype(np.float64)
            off = float(np.linalg.norm(kept - vector)) / length
            if not off <= ROOM * spread:
                what = f"{name or 'parameters'} of the checkpoint"
                step = int(segment.end["version"]) - 1
                return Difference(step=step, what=what, blocks=(block,), off=off, bound=ROOM * spread)
    return None


def _load(folder: Path, block: int, layout: Layout, run: BlockState) -> dict[str, Any]:
    """Name → vector in float64, of a state that one_machine.py has saved."""
    kept = sorted(run.optimizer)
    state = block_state.load((folder / f"block-{block}.safetensors").read_bytes(), block, layout, kept)
    zeros = np.zeros_like(state.parameters)
    vectors = state.vectors()
    return {name: vectors.get(name, zeros).astype(np.float64) for name in ("", *kept)}


def _relative(number: float, reference: float) -> float:
    """Relative difference; NaN if one of them is."""
    return abs(number - reference) / max(abs(reference), 1e-30)
