"""Inputs of a plan: devices, the links between them, and the demand of a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetpeer.stages.graph.block_spec import times_forward

Floats = NDArray[np.float64]
LATENCY_S, LINE = 0.02, 125e6
"""Seconds one way and bytes/s of links without other information."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """N devices. Links are directed: [i, j] is from i to j."""

    flops: Floats
    """FLOP/s that a worker reaches."""
    memory: Floats
    """Bytes that each device offers, (N,)."""
    uplink: Floats
    """Bytes/s to all others together; infinite if only the pairs are known."""
    latency: Floats
    """Seconds, (N, N)."""
    bandwidth: Floats
    """Bytes/s, (N, N); 0: the two devices do not reach each other."""

    def __len__(self) -> int:
        return len(self.flops)

    def some(self, which: Sequence[int]) -> Devices:
        """The devices `which`, in this order."""
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
    """Factors by which links compress tensors (docs/links.md)."""

    forward: float = 1.0
    backward: float = 1.0
    reduce: float = 1.0
    """Factor for gradients on their way into sums, and for the sums."""
    adaptive: bool = False
    """Whether activations and their gradients are compressed only on links slower than computing, as far as
    it helps.

    This is FusionLLM's Eq. 7.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """Pipelines train batches of their own, and average (mode `grouped`, docs/averaging.md)."""

    interval: int = 1
    """Batches that a pipeline trains before it averages."""
    delayed: bool = False
    """Whether a pipeline trains its next batches while it averages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDemand:
    """Demand of a step for each of B blocks."""

    flops: Floats
    """FLOPs of a microbatch's forward, (B,)."""
    memory: Floats
    """Bytes of a block's parameters, gradients, slots and optimizer state, (B,)."""
    kept: Floats
    """Bytes of a microbatch between its forward and its backward, (B,)."""
    crossing: Floats
    """Bytes of a microbatch that enter block b; its gradient has as many. (B + 1,), 0 at both ends."""
    reduced: Floats
    """Bytes of a block's gradient, (B,)."""
    state: Floats
    """Bytes of a block's state that a newcomer fetches, (B,)."""
    microbatches: int
    """Microbatches of a step."""
    recompute: bool = False
    compression: Compression = Compression()
    staleness: int = 0
    """Steps that begin before the one that they follow is over (docs/asynchronous.md)."""
    averaging: Averaging | None = None
    """None: all pipelines share the microbatches of each step (mode `exact`)."""
    between_s: float = 0.0
    """Seconds from a step's last work or last sum to the next step's first work: votes, commit, update."""

    def __len__(self) -> int:
        return len(self.flops)

    @property
    def computed(self) -> int:
        """FLOPs of a microbatch, as a multiple of its forward's."""
        return times_forward(self.recompute)

    def step_s(self, steady: float, alone: float, after: float) -> float:
        """Seconds from one step to the next.

        `steady`: its microbatches if the pipeline never empties; `alone`: a step by itself, with filling and
        draining; `after`: from its last work to its end: reduce and `between_s`. Steps one after the other
        take both. Of S + 1 that overlap none waits for filling or reduces, as long as those go on beside the
        work of the next; but each takes its time from beginning to end, and no more than S + 1 are under way.
        """
        if not self.staleness:
            return alone + after
        return max(steady, after, (alone + after) / (self.staleness + 1))
