"""What a plan is made of: devices, what lies between them, and what a step asks of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LATENCY_S, LINE = 0.02, 125e6
"""One way, and bytes/s, of lines of which nobody says more."""


def times_forward(recompute: bool) -> int:
    """A microbatch's forward and backward take so many times the FLOPs of its forward."""
    return 4 if recompute else 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """N of them. Lines are directed: [i, j] is from i to j."""

    flops: Floats
    """FLOP/s that a worker reaches."""
    memory: Floats
    """Bytes that it gives."""
    uplink: Floats
    """Bytes/s that leave it, to all others together; infinite where only the pairs are known."""
    latency: Floats
    """Seconds, (N, N)."""
    bandwidth: Floats
    """Bytes/s, (N, N); 0: they do not reach each other."""

    def __len__(self) -> int:
        return len(self.flops)

    def some(self, which: Sequence[int]) -> Devices:
        """These alone, in this order."""
        chosen, pairs = list(which), np.ix_(which, which)
        return Devices(
            flops=self.flops[chosen],
            memory=self.memory[chosen],
            uplink=self.uplink[chosen],
            latency=self.latency[pairs],
            bandwidth=self.bandwidth[pairs],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """How many times fewer bytes lines carry than tensors take in memory (docs/links.md)."""

    forward: float = 1.0
    backward: float = 1.0
    reduce: float = 1.0
    """Of gradients on their way into sums, and of the sums."""
    adaptive: bool = False
    """Whether activations and their gradients are only compressed on lines that are slower than computing, and only as far as it helps (FusionLLM, Eq. 7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """Pipelines train batches of their own, and average (mode `grouped`, docs/averaging.md)."""

    interval: int = 1
    """Batches that a pipeline trains before it averages."""
    delayed: bool = False
    """Whether it trains the next ones meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDemand:
    """What a step asks, block by block; B blocks."""

    flops: Floats
    """Of a microbatch's forward, (B,)."""
    memory: Floats
    """Bytes of a block's parameters, gradients, slots and what the optimizer keeps, (B,)."""
    kept: Floats
    """Bytes of a microbatch between its forward and its backward, (B,)."""
    crossing: Floats
    """Bytes of a microbatch that enter block b, as they lie in memory; as many come back as a gradient. (B + 1,), nothing at both ends."""
    reduced: Floats
    """Bytes of a block's gradient, (B,)."""
    state: Floats
    """Bytes that a newcomer fetches of a block, (B,)."""
    microbatches: int
    """Of a step."""
    recompute: bool = False
    compression: Compression = Compression()
    staleness: int = 0
    """So many steps begin before the one that they follow is over (docs/asynchronous.md)."""
    averaging: Averaging | None = None
    """None: all pipelines share the microbatches of each step (mode `exact`)."""
    between_s: float = 0.0
    """Seconds from the last work of a step, or its last sum, to the first work of the next: votes, the coordinator's word, the update."""

    def __len__(self) -> int:
        return len(self.flops)

    @property
    def computed(self) -> int:
        """Times the forward's FLOPs that a microbatch takes."""
        return times_forward(self.recompute)

    def step_s(self, steady: float, alone: float, after: float) -> float:
        """Seconds from one step to the next. `steady`: of its microbatches where the pipeline is never empty; `alone`: of a step by itself, filling and draining;
        `after`: from its last work to its end: of its sums, and `between_s`.

        Steps one after the other take both. Of S + 1 that overlap none waits for a pipeline to fill, nor for sums, as long as those go on beside the work of the next; but each takes as long
        as it takes from its beginning to its end, and no more than S + 1 are under way.
        """
        if not self.staleness:
            return alone + after
        return max(steady, after, (alone + after) / (self.staleness + 1))
