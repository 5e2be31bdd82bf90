"""Stakes of a change to a running swarm, by the steps and moves that were measured. Pure.

Docs: planning.md, "A move pays for itself".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WORTH = 0.1
"""Least fraction by which a step must become shorter, departures included."""
LONGER = 0.05
"""Most by which a step may become longer for steadier holders (HPS' reliable group), as a fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stakes:
    """Steps that a change would shorten, and what it is known to take.

    The gain of a change is what the model says, in seconds; less where the model takes the present step for
    longer than it was measured: then in proportion. Seconds that the model does not see are not promised.

    >>> Stakes(steps=10, measured_s=30.0).gain_s(before_s=20.0, after_s=15.0)
    5.0
    >>> Stakes(steps=10, measured_s=30.0).gain_s(before_s=60.0, after_s=45.0)
    7.5
    """

    steps: float
    """Steps that are left."""
    measured_s: float | None = None
    """Seconds of a step as things stand, as measured; None: the model's figure counts."""
    costs: float = 1.0
    """Measured over foreseen seconds of moves."""
    demand: float = 1.0
    """Factor by which a gain must exceed its usual least."""

    def believed(self, before_s: float) -> float:
        """Share of a modelled gain that counts, if the model says `before_s` for the present step."""
        if self.measured_s is None or not math.isfinite(before_s):
            return 1.0
        return min(1.0, self.measured_s / before_s)

    def gain_s(self, before_s: float, after_s: float) -> float:
        """Seconds by which a step becomes shorter; infinite if none could run."""
        return (before_s - after_s) * self.believed(before_s)

    def present_s(self, before_s: float) -> float:
        """Seconds of a step as things stand; infinite if none can run."""
        return before_s if self.measured_s is None or not math.isfinite(before_s) else self.measured_s

    def pays(self, before_s: float, after_s: float, moving_s: float, steadier_s: float = 0.0) -> bool:
        """Whether a change is worth it: by a tenth of a step, and by its cost in the steps that are left.

        `steadier_s`: seconds of a step that departures cost less after it.
        """
        if not math.isfinite(before_s):
            return math.isfinite(after_s)
        if after_s > (1.0 + LONGER) * before_s:
            return False
        gain_s = (self.gain_s(before_s, after_s) + steadier_s) / self.demand
        return gain_s > WORTH * self.present_s(before_s) and self.steps * gain_s > moving_s
