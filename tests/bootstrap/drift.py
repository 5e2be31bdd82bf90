"""Differences between a short run and the author's module in plain torch: within rounding, if the blocks and
their update are the module's and torch's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hetpeer.bootstrap.log.history import History, Record
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.checkpoints import CheckpointStore
from hetpeer.stages.block import block_state, state_file
from tests.reference.reference_run import ReferenceRun

LOSS_GATE = 1e-6
"""Largest relative difference of a training or held-out loss; float32 sums in another order stay below."""
GRADIENT_GATE = 1e-4
"""Largest relative difference of a gradient's norm, and of a moment as a vector (2-norm)."""
PARAMETER_GATE = 1e-3
"""The same for the parameters: AdamW turns a gradient that is only rounding into full steps."""


@dataclass(slots=True)
class Comparison:
    """Differences between the run and one machine."""

    steps: int
    max_relative_loss_difference: float = 0.0
    """Over all steps' training losses and all evaluations."""
    max_relative_norm_difference: float = 0.0
    """Over all steps' gradient norms before clipping."""
    relative_moment_difference: float | None = None
    """Largest difference of the optimizer state; None if there is no checkpoint of the last step."""
    relative_parameter_difference: float | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every compared number is within its gate."""
        return not self.problems


def compare(directory: Path, reference: ReferenceRun) -> Comparison:
    """Compare the run's surviving history and its last checkpoint with a reference of as many steps."""
    run = RunDirectory.open(directory)
    history = History.of(read_log(run.log_path))
    comparison = Comparison(steps=history.version)
    _compare_losses(history, reference.records, comparison)
    if history.checkpoint and history.checkpoint_version == history.version:
        _compare_states(run, history.checkpoint, reference.state, comparison)
    _judge(comparison)
    return comparison


def _compare_losses(history: History, records: Mapping[str, Any], comparison: Comparison) -> None:
    commits = history.commits
    losses = [(commits[step]["loss"], loss) for step, loss in enumerate(records["losses"]) if step in commits]
    for version, loss in records["evaluations"].items():
        if int(version) in history.evaluations:
            losses.append((history.evaluations[int(version)], loss))
    norms = [(commits[step]["norm"], norm) for step, norm in enumerate(records["norms"]) if step in commits]
    comparison.max_relative_loss_difference = _max_relative(losses)
    comparison.max_relative_norm_difference = _max_relative(norms)


def _max_relative(pairs: Sequence[tuple[float, float]]) -> float:
    ours, theirs = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return float(np.max(np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1e-30), initial=0.0))


def _compare_states(
    run: RunDirectory,
    checkpoint: Record,
    reference: Mapping[str, np.ndarray[Any, Any]],
    comparison: Comparison,
) -> None:
    """Set the relative 2-norms of the differences of parameters and moments, over the whole model."""
    layouts = run.layouts()
    store = CheckpointStore(run, layouts)
    states = [store.load_state(checkpoint, block) for block in range(len(layouts))]
    names = [name for layout in layouts for name, _ in layout]
    differences = []
    for kind in ("", *run.manifest.optimizer_state):
        ours = np.concatenate([_vector_or_zeros(state, kind) for state in states]).astype(np.float64)
        zeros = [np.zeros(math.prod(shape)) for layout in layouts for _, shape in layout]
        theirs = np.concatenate(
            [
                reference.get(state_file.tensor_name(kind, n), zero).ravel()
                for n, zero in zip(names, zeros, strict=True)
            ]
        ).astype(np.float64)  # BatchNorm's running values have no moments
        differences.append(float(np.linalg.norm(ours - theirs) / (np.linalg.norm(theirs) or 1.0)))
    comparison.relative_parameter_difference = differences[0]
    comparison.relative_moment_difference = float(np.max(differences[1:], initial=0.0))


def _vector_or_zeros(state: block_state.BlockState, kind: str) -> block_state.Vector:
    """Vector `kind` of `state` ("": the parameters); a state leaves out vectors that are all zero."""
    return state.vectors().get(kind, np.zeros_like(state.parameters))


def _judge(comparison: Comparison) -> None:
    """Add a problem for each difference beyond its gate. NaN exceeds every gate."""
    gates = [
        ("losses", comparison.max_relative_loss_difference, LOSS_GATE),
        ("gradient norms", comparison.max_relative_norm_difference, GRADIENT_GATE),
        ("final moments", comparison.relative_moment_difference or 0.0, GRADIENT_GATE),
        ("final parameters", comparison.relative_parameter_difference or 0.0, PARAMETER_GATE),
    ]
    for what, difference, gate in gates:
        if not difference <= gate:
            comparison.problems.append(
                f"{what} differ from one machine's by {difference:.1e}, allowed is {gate:.0e}"
            )
