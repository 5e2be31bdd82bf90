"""Age of the parameters with which a step that overlaps computes each microbatch, block by block. Pure.

The coordinator decides one number for a step when it opens it, `behind`. The rest follows from the manifest,
so every holder, the audit and one machine get the same versions (docs/asynchronous.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

EVERY_ID: Final = 1 << 30
"""More than a step has ids."""


@dataclass(frozen=True, slots=True)
class Delays:
    """The rule of one run. By default all of a step is computed with the version that it was opened with.

    Blocks 0 to 2 at most two versions behind, and blocks from 3 on at most one:

        delays = Delays(stages=((0, 2), (3, 1)))
        delays.behind(2, microbatch=0, block=1)  # 2
        delays.behind(2, microbatch=0, block=3)  # 1
    """

    head_start: int = EVERY_ID
    """Ids from this one on are computed with the version that the step's update is applied to."""
    stages: tuple[tuple[int, int], ...] = ()
    """(first block, most versions behind) of each stage; none is further behind than one before it.

    Empty: there is no bound.
    """

    def behind(self, opened: int, microbatch: int, block: int) -> int:
        """Versions that `block`'s parameters are behind, in a step that was opened `opened` behind."""
        if microbatch >= self.head_start:
            return 0
        bounds = (most for begin, most in reversed(self.stages) if begin <= block)
        return min(opened, next(bounds, opened))

    def waits(self, opened: int) -> bool:
        """Whether a step that is opened `opened` behind has stages that wait for versions to come."""
        return bool(self.stages) and self.stages[-1][1] < opened
