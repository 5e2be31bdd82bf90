"""Codecs and their sizes, without tensors: for planning, checks and decisions.

The receiver of a tensor knows its dtype and number of elements from the graph, and the codec from the
manifest; `EncodedTensor` comes with the frame. These four give the number of bytes before any of them is
read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import ITEM_BYTES
from hetpeer.stages.links.value_codec import ValueCodec
from hetpeer.stages.links.value_codecs import VALUE_CODECS

EXACT_TOLERANCE, ANY_TOLERANCE = 1e-3, 1.0
"""`tolerance` of sums in float32, and of those of which parts are left out."""
FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})
TOP_K = "topk-"
NONE = "none"


def reduce_codec_names() -> list[str]:
    """Names for a reduce."""
    return [NONE, *VALUE_CODECS]


def sparse_codec_names() -> list[str]:
    """Names for a reduce of movements."""
    return [name for name, codec in VALUE_CODECS.items() if codec.of_movements]


def codec_names() -> list[str]:
    """Names for links: also those with `topk-`, but none of movements."""
    plain = [name for name, codec in VALUE_CODECS.items() if not codec.of_movements]
    return [NONE, *plain, *(TOP_K + name for name, codec in VALUE_CODECS.items() if codec.with_top_k)]


def bitmap_bytes(count: int) -> int:
    """Bytes of one bit for each of `count` elements: sent positions never take more."""
    return -(-count // 8)


Count = Annotated[int, Field(ge=0, lt=1 << 40)]


@dataclass(frozen=True, slots=True)
class Codec:
    """Encoding of the floating-point tensors of a bundle. `Codec()` keeps them bit for bit.

    codec = Codec.of("topk-int8")
    codec.cost(0.1)  # bytes for each element of a float32 tensor if one in ten is kept
    """

    values: ValueCodec | None = None
    sparse: bool = False

    @classmethod
    def of(cls, name: str) -> Self:
        """The codec with a manifest's name. Raises ValueError that names the known ones."""
        if name == NONE:
            return cls()
        if name not in {*codec_names(), *reduce_codec_names()}:
            raise ValueError(f"unknown codec {name!r}; known: {', '.join(codec_names())}")
        return cls(VALUE_CODECS[name.removeprefix(TOP_K)], sparse=name.startswith(TOP_K))

    @property
    def of_movements(self) -> bool:
        """Whether it is for what clusters have moved (`ValueCodec.of_movements`)."""
        return self.values is not None and self.values.of_movements

    def __str__(self) -> str:
        return NONE if self.values is None else (TOP_K if self.sparse else "") + self.values.name

    @property
    def tolerance(self) -> float:
        """Largest relative distance of two honest volunteers' sums if tensors are sent by this codec."""
        if self.values is None:
            return EXACT_TOLERANCE
        return ANY_TOLERANCE if self.sparse else self.values.tolerance

    @property
    def repeatable(self) -> bool:
        """Whether two volunteers that compute the same send nearly the same."""
        return self.values is None or (self.values.repeatable and not self.sparse)

    def changes(self, dtype: str) -> bool:
        """Whether encoded tensors of `dtype` differ from their memory."""
        return self.values is not None and dtype in FLOATING

    def selects(self, kept: int, count: int) -> bool:
        """Whether positions are sent when `kept` of `count` elements are kept."""
        return self.sparse and kept < count

    def cost(self, share: float) -> float:
        """Bytes for each element of a float32 tensor if `share` of them are kept, as plans assume.

        Positions cost their entropy plus a twentieth, and never more than a bitmap.
        """
        if self.values is None:
            return 4.0
        width = self.values.nbytes(1 << 20) / (1 << 20)
        if not self.sparse or share >= 1.0:
            return width
        entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8
        return share * width + min(1.05 * entropy, 1 / 8)


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A frame's entry for an encoded tensor: elements kept (all if not sparse), and their positions."""

    kept: Count
    form: Annotated[int, Field(ge=0, lt=16)] = 0
    position_bytes: Count = 0
    value_bytes: Count = 0
    """Bytes of the values if they are squeezed; 0: they are as the codec writes them."""


def kept_of(count: int, share: float) -> int:
    """Elements to keep of a tensor: at least one."""
    return min(count, max(1, round(count * share)))


def room(codec: Codec, dtype: str, count: int, kept: int) -> int:
    """Most bytes of an encoded tensor if `kept` of its `count` elements are kept."""
    if codec.values is None or not codec.changes(dtype):
        return count * ITEM_BYTES[dtype]
    if not codec.selects(kept, count):
        return codec.values.nbytes(count)
    return codec.values.nbytes(kept) + bitmap_bytes(count)


def length(codec: Codec, dtype: str, count: int, written: EncodedTensor) -> int:
    """Bytes of an encoded tensor, before any allocation. Raises ProtocolError for an impossible `written`."""
    if codec.values is None or not codec.changes(dtype):
        if written != EncodedTensor(count):
            raise ProtocolError(f"{written} of a tensor of {count} elements, which are sent as they are")
        return room(codec, dtype, count, count)
    if not codec.selects(written.kept, count):
        if written != EncodedTensor(count, value_bytes=written.value_bytes):
            raise ProtocolError(f"{written} of a tensor of {count} elements, all of which are sent")
    elif not written.kept or not 0 < written.position_bytes <= bitmap_bytes(count):
        raise ProtocolError(f"{written} of a tensor of {count} elements")
    most = codec.values.nbytes(written.kept)
    if written.value_bytes and (written.value_bytes >= most or not codec.values.squeezable):
        raise ProtocolError(f"{written} of values that take {most} bytes")
    return (written.value_bytes or most) + written.position_bytes
