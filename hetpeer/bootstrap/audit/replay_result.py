"""The result of a replay, or of a part of it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from hetpeer.bootstrap.audit.replay_script import Difference

SURE = 0.95
"""Confidence that a sample's result is stated with."""


@dataclass(slots=True)
class Replay:
    """Result of a replay."""

    steps: int
    """Steps of the surviving history whose evidence is there."""
    equal: int = 0
    """Steps that are the run's to the last bit."""
    near: int = 0
    """Steps on another processor, or in another order, that are as near as rounding allows."""
    shown: int = 0
    """Steps that cannot be judged, since the run's links or dtype round more than one machine does."""
    evaluations: int = 0
    """Held-out losses that were compared."""
    farthest: float = 0.0
    """Largest relative difference among the numbers of `near` and `shown` steps."""
    bound: float = 0.0
    """Largest relative difference that was allowed in `near` steps."""
    here: str = ""
    """Arithmetic of this machine."""
    why: str = ""
    """Reason why not all steps could be compared to the last bit."""
    sample: int | None = None
    """Steps that were drawn; None: all steps were compared."""
    differences: list[Difference] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    """Step → loss by this machine."""

    @property
    def problems(self) -> list[str]:
        """A line for each difference, in the order of steps."""
        return list(map(str, sorted(self.differences, key=lambda one: one.step)))

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def document(self) -> dict[str, Any]:
        """The result as plain data, for JSON; without `losses`, of which there are as many as steps."""
        found = {name: value for name, value in asdict(self).items() if name != "losses"}
        return {"ok": self.ok, **found, "problems": self.problems, "undetected": self.undetected}

    def add(self, part: Replay) -> None:
        """Take in the result of one segment; `steps` stays."""
        self.equal += part.equal
        self.near += part.near
        self.shown += part.shown
        self.evaluations += part.evaluations
        self.farthest, self.bound = max(self.farthest, part.farthest), max(self.bound, part.bound)
        self.here, self.why = part.here or self.here, self.why or part.why
        self.differences += part.differences
        self.losses |= part.losses

    @property
    def undetected(self) -> int:
        """Most wrong steps that the sample may have missed, with the confidence SURE; 0: all were compared.

        Drawn without replacement: the least w with C(steps - w, sample) / C(steps, sample) ≤ 1 - SURE, less
        one.
        """
        if self.sample is None:
            return 0
        missed = (
            wrong
            for wrong in range(1, self.steps + 1)
            if math.comb(self.steps - wrong, self.sample) <= (1 - SURE) * math.comb(self.steps, self.sample)
        )
        return next(missed, 1) - 1
