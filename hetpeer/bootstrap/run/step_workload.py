"""Work of a run's step for planners: FLOPs, bytes and memory per block
(stages/planning/swarms/plan_inputs.py). Pure.
"""

from __future__ import annotations

import numpy as np

from hetpeer.bootstrap.run.manifest import BlockEntry, Manifest
from hetpeer.bootstrap.run.settings import LinkSettings
from hetpeer.stages.links.adaptive_ratio import coding_for
from hetpeer.stages.links.codec import Codec
from hetpeer.stages.pipeline.gradient_slots import LIVE
from hetpeer.stages.planning.swarms.plan_inputs import Averaging, Compression, StepDemand

FLOAT = 4


def of_manifest(manifest: Manifest, microbatches: int) -> StepDemand:
    """Demand of a step of `microbatches` microbatches: FLOPs and bytes per block."""
    blocks = manifest.blocks
    vectors = np.array([block.vector_count * FLOAT for block in blocks], dtype=np.float64)
    return StepDemand(
        flops=np.array([block.flops_forward for block in blocks], dtype=np.float64),
        # parameters, the gradient, what is kept, slots; constants
        memory=(2 + manifest.kept + LIVE) * vectors + np.array([constant_bytes(block) for block in blocks]),
        kept=np.array([block.activation_bytes for block in blocks], dtype=np.float64),
        crossing=np.array([0, *(block.output_bytes for block in blocks[:-1]), 0], dtype=np.float64),
        reduced=vectors,
        state=(1 + manifest.kept) * vectors,
        microbatches=microbatches,
        recompute=manifest.training.recompute,
        compression=of_links(manifest.links),
        staleness=manifest.training.staleness,
        averaging=None
        if (own := manifest.averaging) is None
        else Averaging(interval=own.interval, delayed=own.delayed),
    )


def constant_bytes(block: BlockEntry) -> int:
    """Bytes of a block's constants: masks, and what is frozen."""
    return 0 if block.buffers is None else block.buffers.bytes


def of_links(links: LinkSettings) -> Compression:
    """Compression that a run's links may use."""

    def times(codec: Codec) -> float:
        coding = coding_for(codec, links.ratio, FLOAT)
        return FLOAT / coding.codec.cost(coding.share)

    forward, reduce = Codec.of(links.codec), Codec.of(links.reduce)
    return Compression(
        forward=times(forward),
        backward=times(forward if forward.sparse or links.backward is None else Codec.of(links.backward)),
        reduce=FLOAT / reduce.cost(1.0),
        adaptive=links.adaptive,
    )
