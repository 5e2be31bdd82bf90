"""Codecs and their sizes, without tensors: for planning, checks and decisions.

The receiver of a tensor knows its dtype and number of elements from the graph, and the codec from the
manifest; `EncodedTensor` comes with the frame. These four give the number of bytes before any of them is
read.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import ITEM_BYTES

FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})


class Values(enum.StrEnum):
    """Encodings of floating-point values: halves, or steps of 8 or 4 bits with a scale for each group."""

    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"


GROUPS = {Values.INT8: 256, Values.INT4: 64}
"""Values that share a scale; fewer for fewer bits."""


def value_bytes(values: Values, count: int) -> int:
    """Bytes of `count` values, scales included."""
    if values not in GROUPS:
        return 2 * count
    scales = 2 * -(-count // GROUPS[values])
    return scales + (count if values is Values.INT8 else -(-count // 2))


def bitmap_bytes(count: int) -> int:
    """Bytes of one bit for each of `count` elements: sent positions never take more."""
    return -(-count // 8)


Count = Annotated[int, Field(ge=0, lt=1 << 40)]


@dataclass(frozen=True, slots=True)
class Codec:
    """Encoding of the floating-point tensors of a bundle. `Codec()` keeps them bit for bit.

        codec = Codec.of("topk-int8")
        codec.cost(0.1)  # bytes for each element of a float32 tensor if one in ten is kept

    A codec is added by a member of `Values`, its bytes in `value_bytes`, and its code in quantized_values.py.
    """

    values: Values | None = None
    sparse: bool = False

    @classmethod
    def of(cls, name: str) -> Self:
        """The codec with a manifest's name. Raises ValueError.

        Names: `none`, `bf16`, `fp16`, `int8`, `int4`, or `topk-` and one of them except fp16.
        """
        kind, _, values = name.rpartition("-")
        if name == "none":
            return cls()
        if kind not in ("", "topk") or (kind and values == Values.FP16):
            raise ValueError(f"no codec is called {name!r}")
        return cls(Values(values), sparse=bool(kind))

    def __str__(self) -> str:
        return "none" if self.values is None else f"topk-{self.values}" if self.sparse else self.values.value

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
        width = value_bytes(self.values, 1 << 20) / (1 << 20)
        if not self.sparse or share >= 1.0:
            return width
        entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8
        return share * width + min(1.05 * entropy, 1 / 8)


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A frame's entry for one encoded tensor: elements kept (all, unless the codec is sparse), and their
    positions.
    """

    kept: Count
    form: Annotated[int, Field(ge=0, lt=16)] = 0
    position_bytes: Count = 0


def kept_of(count: int, share: float) -> int:
    """Elements to keep of a tensor: at least one."""
    return min(count, max(1, round(count * share)))


def room(codec: Codec, dtype: str, count: int, kept: int) -> int:
    """Most bytes of an encoded tensor if `kept` of its `count` elements are kept."""
    if codec.values is None or not codec.changes(dtype):
        return count * ITEM_BYTES[dtype]
    if not codec.selects(kept, count):
        return value_bytes(codec.values, count)
    return value_bytes(codec.values, kept) + bitmap_bytes(count)


def length(codec: Codec, dtype: str, count: int, written: EncodedTensor) -> int:
    """Bytes of an encoded tensor, before any allocation. Raises ProtocolError if `written` is impossible for
    it.
    """
    if codec.values is None or not codec.changes(dtype) or not codec.selects(written.kept, count):
        if written != EncodedTensor(count):
            raise ProtocolError(f"{written} of a tensor of {count} elements, all of which are sent")
        return room(codec, dtype, count, count)
    if not written.kept or not 0 < written.position_bytes <= bitmap_bytes(count):
        raise ProtocolError(f"{written} of a tensor of {count} elements")
    return value_bytes(codec.values, written.kept) + written.position_bytes
