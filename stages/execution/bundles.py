"""How a bundle of tensors lies in one piece of memory: the same on the wire and in the arena.

One tensor after the other in the order of the block's spec, each at a multiple of 64 bytes, so that every one can be
used where it lies. Gradients of a bundle are laid out the same way, without the tensors that have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetpeer.stages.execution.arena import Extent
from hetpeer.stages.graph.spec import TensorSpec

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class BundleLayout:
    """Name → (offset, bytes) within a piece of `nbytes`."""

    places: Mapping[str, tuple[int, int]]
    nbytes: int

    @classmethod
    def of(cls, specs: Mapping[str, TensorSpec], *, gradients: bool = False) -> BundleLayout:
        """The layout of the tensors of `specs`, or of their gradients."""
        places: dict[str, tuple[int, int]] = {}
        offset = 0
        for name, spec in specs.items():
            if gradients and not spec.grad:
                continue
            places[name] = (offset, spec.nbytes)
            offset += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(places, offset)

    def within(self, extent: Extent) -> dict[str, Extent]:
        """The extent of each tensor, if the bundle lies at `extent`."""
        return {
            name: Extent(offset=extent.offset + offset, nbytes=nbytes)
            for name, (offset, nbytes) in self.places.items()
        }
