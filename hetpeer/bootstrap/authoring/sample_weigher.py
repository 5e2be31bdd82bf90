"""Weights of the author's samples, taken while their shards are written (docs/data.md, "Weights")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.data.microbatches import DataPlan
from hetpeer.stages.data.sample_weights import Weights, write_weights
from hetpeer.stages.data.shards import Arrays

WEIGHT = "weight"
"""Array of a sample whose sum is the sample's weight."""
Weigh = Callable[[Arrays], Weights]
"""Arrays of samples [samples, …] → their weights."""
STEPS = 10_000
"""Steps that are looked at for one in which nothing counts."""


class SampleWeigher:
    """Collects the weight of each sample: the sum of its array `weight`, or else what `counted` says.

    `counted`: what the loss says of weights; None: samples count alike.
    """

    def __init__(self, counted: Weigh | None) -> None:
        self._counted = counted
        self._parts: list[Weights] = []

    def of(self, rows: Arrays) -> Weights:
        """Weights of `rows`, name → array [samples, …]. Raises `LocalError` HP-DATA-005 if one is below 0."""
        samples = len(next(iter(rows.values())))
        if WEIGHT in rows:
            weights: Weights = (
                rows[WEIGHT].reshape(samples, -1).sum(axis=1, dtype=np.float64).astype(np.float32)
            )
            if (rows[WEIGHT] < 0).any():
                raise LocalError(
                    "HP-DATA-005",
                    f"a sample has a negative number in its array {WEIGHT!r}",
                    why="that array says how much a sample counts in the mean loss",
                    fix="use numbers from 0 on, or give the array another name",
                    exit_code=ExitCode.CONFIG,
                )
            return weights
        if self._counted is None:
            return np.ones(samples, dtype=np.float32)
        return self._counted(rows)

    def look(self, rows: Arrays) -> None:
        """Take samples into account, in the order of the shards."""
        self._parts.append(self.of(rows))

    def found(self) -> Weights | None:
        """The weights of all samples; None if they count alike."""
        weights = np.concatenate(self._parts or [np.ones(1, dtype=np.float32)])
        return None if weights.min() == weights.max() > 0 else weights

    def write(self, folder: Path) -> dict[str, Any] | None:
        """Write the file of weights into `folder`, if there are any; returns its fields. Raises OSError."""
        weights = self.found()
        return None if weights is None else write_weights(folder, weights)


def check_steps(plan: DataPlan, weights: Weights | None, steps: int) -> None:
    """Check that something counts in each of the first steps, and in an evaluation.

    Raises `LocalError` HP-DATA-012.
    """
    if weights is None or weights.all():
        return
    plan = replace(plan, weights=weights)
    empty = next((step for step in range(min(steps, STEPS)) if not any(plan.training_weights(step))), None)
    if empty is not None:
        raise _nothing_counts(f"step {empty + 1} would", "choose a larger --batch-size")
    if not any(plan.evaluation_weights.values()):
        raise _nothing_counts("evaluations would", "let them have more samples (--eval-samples)")


def _nothing_counts(what: str, fix: str) -> LocalError:
    return LocalError(
        "HP-DATA-012",
        f"{what} have nothing to learn from: all their samples have the weight 0",
        why="all their labels are ignored, or their array 'weight' is 0",
        fix=f"leave such samples out, or {fix}",
        exit_code=ExitCode.CONFIG,
    )
