"""Which blocks of a place run their forward again before the backward, instead of keeping activations.

Recomputing changes no bit, so each volunteer chooses for itself, block by block: only as many as its memory
asks for, and those that cost the least time (gradient checkpointing; Chen et al., Training deep nets with
sublinear memory cost, arXiv 1604.06174). It is a knapsack problem with few items. The greedy order by time
for each byte saved is not always the optimum, but never takes a block that could be left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hetpeer.stages.graph.block_spec import BlockSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivations:
    """What one block keeps of one full microbatch from its forward to its backward."""

    block: int
    kept: int
    """Bytes, if it keeps all that its backward reads."""
    entering: int
    """Bytes, if it recomputes: what enters it."""
    forward: float
    """Time of its forward, in any unit."""

    @classmethod
    def of(cls, spec: BlockSpec) -> BlockActivations:
        """By what the graph says; FLOPs stand for time, since one device runs all blocks of a place."""
        entering = spec.recomputing().activation_bytes
        return cls(
            block=spec.index, kept=spec.activation_bytes, entering=entering, forward=spec.flops_forward
        )

    @property
    def saved(self) -> int:
        """Bytes of a microbatch that recomputing saves."""
        return self.kept - self.entering


def recomputed_blocks(
    blocks: Sequence[BlockActivations], memory_bytes: int, microbatches: int
) -> frozenset[int]:
    """The blocks to recompute so that `microbatches` in flight take no more than `memory_bytes`.

    None if they fit anyway. If they do not fit whatever is recomputed, those with which they take the least.

        >>> blocks = [BlockActivations(block=n, kept=100, entering=10, forward=n) for n in (1, 2)]
        >>> sorted(recomputed_blocks(blocks, 800, 5))  # 5 * 110 of the two, and 90 of the one at work
        [1]
    """
    chosen: list[BlockActivations] = []

    def fit(some: Collection[BlockActivations]) -> bool:
        return in_flight_bytes(blocks, some, microbatches) <= memory_bytes

    for block in sorted((one for one in blocks if one.saved > 0), key=_price):
        if fit(chosen):
            break
        chosen.append(block)
    for block in sorted(chosen, key=lambda one: -one.forward):
        others = [one for one in chosen if one is not block]
        # of one microbatch nothing is saved by the largest block, as it is at work
        useless = in_flight_bytes(blocks, others, microbatches) <= in_flight_bytes(
            blocks, chosen, microbatches
        )
        if useless or fit(others):
            chosen = others
    return frozenset(one.block for one in chosen)


def _price(block: BlockActivations) -> float:
    """Time for each byte saved."""
    return block.forward / block.saved


def in_flight_bytes(
    blocks: Iterable[BlockActivations], recomputed: Collection[BlockActivations], microbatches: int
) -> int:
    """Bytes of so many microbatches between forward and backward, if some blocks are recomputed.

    The one at work has the activations of one recomputed block again, the largest at worst.
    """
    each = sum(one.entering if one in recomputed else one.kept for one in blocks)
    return microbatches * each + max((one.saved for one in recomputed), default=0)
