"""What a volunteer says that a microbatch takes, when it was given none for a while. Pure.

Who was slow in a bad moment is given nothing, computes nothing, and would never be seen to have become faster. So it claims less and less until it is given one
microbatch, which is measured. Who turns out to be as slow as before waits twice as long until the next one: where there are more volunteers than microbatches, there would
be somebody slow to wait for in each step.
"""

from __future__ import annotations

EASE = 0.9
"""With each idle step we claim this part of what we claimed before."""
LONGEST = 64
"""Idle steps for that, at most."""
LEAST = 1 / 16
"""Of what it took we claim at least: who was given nothing for another reason is not to be given everything after it."""


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
        """A step is over, `done` forwards and backwards so far; the last ones took `seconds` a microbatch. Returns what the coordinator is told."""
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
