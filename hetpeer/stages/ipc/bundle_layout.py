"""The layout of a bundle of tensors in one piece of memory: the same on the wire and in the arena.

Tensors follow one another in the order of the block's spec, each at a multiple of 64 bytes, so that each can
be used where it lies. Gradients of a bundle are laid out the same way, without the tensors that have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import ITEM_BYTES, TensorSpec
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.links.codec import FLOATING, Codec, EncodedTensor, kept_of, length, room

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class BundleLayout:
    """Name → (offset, bytes) within a piece of `nbytes` bytes; name → dtype."""

    places: Mapping[str, tuple[int, int]]
    nbytes: int
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, specs: Mapping[str, TensorSpec], *, gradients: bool = False) -> BundleLayout:
        """The layout of the tensors of `specs`, or of their gradients."""
        places: dict[str, tuple[int, int]] = {}
        dtypes: dict[str, str] = {}
        offset = 0
        for name, spec in specs.items():
            if gradients and not spec.grad:
                continue
            places[name], dtypes[name] = (offset, spec.nbytes), spec.dtype
            offset += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(places, offset, dtypes)

    def within(self, extent: Extent) -> dict[str, Extent]:
        """The extent of each tensor if the bundle lies at `extent`."""
        return {
            name: Extent(offset=extent.offset + offset, nbytes=nbytes)
            for name, (offset, nbytes) in self.places.items()
        }

    def tensors(self, extent: Extent) -> tuple[tuple[str, Extent], ...]:
        """(dtype, extent) of each tensor, in order, if the bundle lies at `extent`."""
        return tuple((self.dtypes[name], place) for name, place in self.within(extent).items())

    # ── written by a codec ─────────────────────────────────────────────────────────────────────────────────

    @property
    def width(self) -> float:
        """Bytes of its narrowest floating-point number; 0 if it has none."""
        return float(min((ITEM_BYTES[d] for d in self.dtypes.values() if d in FLOATING), default=0))

    def room(self, codec: Codec, share: float) -> int:
        """Most bytes that it takes encoded, if `share` of each tensor is kept."""
        return sum(room(codec, dtype, count, kept_of(count, share)) for dtype, count in self._counted())

    def written(self, codec: Codec, written: Sequence[EncodedTensor]) -> int:
        """Bytes that it takes encoded, by its head. Raises `ProtocolError` for an impossible head."""
        if len(written) != len(self.places):
            raise ProtocolError(f"{len(written)} encoded tensors for a bundle of {len(self.places)}")
        return sum(
            length(codec, dtype, count, one)
            for one, (dtype, count) in zip(written, self._counted(), strict=True)
        )

    def _counted(self) -> list[tuple[str, int]]:
        """(dtype, elements) of each tensor."""
        return [
            (self.dtypes[name], nbytes // ITEM_BYTES[self.dtypes[name]])
            for name, (_, nbytes) in self.places.items()
        ]
