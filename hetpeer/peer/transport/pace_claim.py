"""Advertised microbatch time of a starved volunteer. Pure.

A volunteer that was slow in a bad moment is given nothing, computes nothing, and would never be seen to have
become faster. So it claims less and less until it is given one microbatch, which is measured. If it is as
slow as before, it waits twice as long until the next one: with more volunteers than microbatches there would
be a slow one to wait for in each step.
"""

from __future__ import annotations

EASE = 0.9
"""Factor of the claim with each idle step."""
LONGEST = 64
"""Idle steps for that, at most."""
LEAST = 1 / 16
"""Least claim, as a share of the measured time: one that was starved for another reason is not given
everything next.
"""


class PaceClaim:
    """Idle steps, and what was measured before them."""

    def __init__(self, done: int = 0) -> None:
        """`done` forwards and backwards so far, elsewhere."""
        self.idle = 0
        """Steps since a microbatch was computed here."""
        self._patience = 1
        self._done = done
        self._before = 0.0

    def say(self, done: int, seconds: float) -> float:
        """The claim after a step, in seconds; `done`: forwards and backwards so far, the last of which took
        `seconds` a microbatch.
        """
        if done == self._done:
            if not self.idle:
                self._before = seconds
            self.idle += 1
        elif self.idle:
            if self._before:
                self._patience = 1 if seconds < EASE * self._before else min(2 * self._patience, LONGEST)
            self.idle = 0
        self._done = done
        return float(seconds * max(EASE ** (self.idle / self._patience), LEAST))
