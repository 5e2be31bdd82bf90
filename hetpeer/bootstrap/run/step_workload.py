"""Work of a run's step for planners: FLOPs, bytes and memory per block
(stages/planning/swarms/plan_inputs.py). Pure.
"""

from __future__ import annotations

import numpy as np

from hetpeer.bootstrap.run.manifest import BlockEntry, Manifest
from hetpeer.bootstrap.run.settings import LinkSettings
from hetpeer.stages.links.adaptive_ratio import coding_for
from hetpeer.stages.links.codec import Codec
from hetpeer.stages.pipeline.place_memory import HALF, IN_FLIGHT, PlaceDemand
from hetpeer.stages.planning.swarms.plan_inputs import Averaging, Compression, StepDemand

FLOAT = 4


def of_manifest(manifest: Manifest, microbatches: int) -> StepDemand:
    """Demand of a step of `microbatches` microbatches: FLOPs and bytes per block."""
    blocks = manifest.blocks
    vectors = np.array([block.vector_count * FLOAT for block in blocks], dtype=np.float64)
    return StepDemand(
        flops=np.array([block.flops_forward for block in blocks], dtype=np.float64),
        constants=np.array([constant_bytes(block) for block in blocks], dtype=np.float64),
        numbers=vectors / FLOAT,
        halved=np.array([_halved(manifest, block) for block in blocks], dtype=np.float64),
        upkeep=manifest.upkeep,
        kept=np.array([block.activation_bytes for block in blocks], dtype=np.float64),
        copies=np.array([_copies(manifest, block) for block in blocks], dtype=np.float64),
        looked_up=np.array([block.looked_up_count for block in blocks], dtype=np.float64),
        recomputable=np.array([_recomputable(manifest, block) for block in blocks], dtype=np.float64),
        crossing=np.array([0, *(block.output_bytes for block in blocks[:-1]), 0], dtype=np.float64),
        reduced=vectors,
        state=manifest.upkeep.in_state * vectors,
        microbatches=microbatches,
        recompute=manifest.training.recompute,
        compression=of_links(manifest.links),
        staleness=manifest.training.staleness,
        checkpoint_every=manifest.training.checkpoint_every,
        averaging=None
        if (own := manifest.averaging) is None
        else Averaging(interval=own.interval, delayed=own.delayed),
    )


def demand_of(manifest: Manifest, block: BlockEntry) -> PlaceDemand:
    """Memory that `block` takes at a holder, with the activations that a place is offered with."""
    return PlaceDemand(
        numbers=block.vector_count,
        halved=_halved(manifest, block),
        looked_up=block.looked_up_count,
        copies=IN_FLIGHT * _copies(manifest, block),
        constants=constant_bytes(block),
        activations=IN_FLIGHT * block.activation_bytes,
        recomputable=(IN_FLIGHT - 1) * _recomputable(manifest, block),  # of the one at work there is all
        upkeep=manifest.upkeep,
    )


def _recomputable(manifest: Manifest, block: BlockEntry) -> int:
    """Bytes that a waiting microbatch need not keep.

    A block that recomputes keeps what enters it, which is what left the one before.
    """
    entering = manifest.blocks[block.index - 1].output_bytes if block.index else block.activation_bytes
    return max(block.activation_bytes - entering, 0)


def _halved(manifest: Manifest, block: BlockEntry) -> int:
    """Elements of which a GPU keeps copies in bfloat16."""
    return block.cast_count if manifest.training.keeps_cast else 0


def _copies(manifest: Manifest, block: BlockEntry) -> int:
    """Bytes that a microbatch keeps of autocast's copies of weights; none where it recomputes."""
    copies = HALF * _halved(manifest, block)
    return copies if copies < block.activation_bytes else 0


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
