"""Codecs: a tensor in fewer bytes, and back (docs/links.md).

The receiver knows dtype and number of elements from the graph, and the codec from the manifest; `Written` comes with
the frame. From these four follows how many bytes there are, before one of them is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from hetpeer.dht.errors import ProtocolError
from hetpeer.stages.links.positions import bitmap_bytes, decode_positions, encode_positions
from hetpeer.stages.links.selection import select
from hetpeer.stages.links.values import Values, decode_values, encode_values, value_bytes

Count = Annotated[int, Field(ge=0, lt=1 << 40)]


@dataclass(frozen=True, slots=True)
class Codec:
    """How the floating-point tensors of a bundle are written. Neither: bit for bit."""

    values: Values | None = None
    sparse: bool = False

    @classmethod
    def of(cls, name: str) -> Self:
        """By the name that the manifest has: `none`, `bf16`, `fp16`, `int8`, `topk-bf16`, `topk-int8`. Raises ValueError."""
        kind, _, values = name.rpartition("-")
        if name == "none":
            return cls()
        if kind not in ("", "topk") or (kind and values == Values.FP16):
            raise ValueError(f"no codec is called {name!r}")
        return cls(Values(values), sparse=bool(kind))

    def __str__(self) -> str:
        return "none" if self.values is None else f"topk-{self.values}" if self.sparse else self.values.value

    def cost(self, share: float) -> float:
        """Bytes for each element of a float32 tensor, when `share` of them are kept: what a plan reckons with.

        Positions cost their entropy, and a twentieth: -log2 of the share for those kept, and what silence says.
        """
        if self.values is None:
            return 4.0
        width = value_bytes(self.values, 1 << 20) / (1 << 20)
        if not self.sparse or share >= 1.0:
            return width
        entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / 8
        return float(share * width + min(1.05 * entropy, 1 / 8))


@dataclass(frozen=True, slots=True)
class Written:
    """What a frame says of one encoded tensor: elements kept (all, unless the codec is sparse), and their positions."""

    kept: Count
    form: Annotated[int, Field(ge=0, lt=16)] = 0
    position_bytes: Count = 0


def room(codec: Codec, count: int, dtype: torch.dtype, kept: int) -> int:
    """Bytes that an encoded tensor takes at most, when `kept` of its `count` elements are."""
    if codec.values is None or not dtype.is_floating_point:
        return count * dtype.itemsize
    if not _is_sparse(codec, kept, count):
        return value_bytes(codec.values, count)
    return value_bytes(codec.values, kept) + bitmap_bytes(count)


def length(codec: Codec, count: int, dtype: torch.dtype, written: Written) -> int:
    """Bytes of an encoded tensor. Raises ProtocolError when `written` cannot be said of it: nothing has been allocated."""
    if codec.values is None or not dtype.is_floating_point or not codec.sparse or written.kept == count:
        if written != Written(count):
            raise ProtocolError(f"{written} of a tensor of {count} elements, all of which are sent")
        return room(codec, count, dtype, count)
    if not 0 < written.kept < count or not 0 < written.position_bytes <= bitmap_bytes(count):
        raise ProtocolError(f"{written} of a tensor of {count} elements")
    return value_bytes(codec.values, written.kept) + written.position_bytes


def encode(
    codec: Codec, flat: Tensor, kept: int, target: memoryview, *, squeeze: bool = True
) -> tuple[Written, int]:
    """Write a finite tensor of one dimension to the beginning of `target`; returns what the frame says, and the bytes.

    `kept` elements survive if the codec is sparse (0 < kept ≤ len(flat)); `target` has at least `room` bytes.
    `squeeze`: spend time to find shorter positions. Raises LocalError HP-NUM-002 when fp16 does not reach so far.
    """
    count = len(flat)
    if codec.values is None or not flat.is_floating_point():
        size = count * flat.element_size()
        torch.frombuffer(target[:size], dtype=flat.dtype).copy_(flat.detach()) if size else None
        return Written(count), size
    if not _is_sparse(codec, kept, count):
        size = value_bytes(codec.values, count)
        encode_values(codec.values, flat, target[:size])
        return Written(count), size
    chosen, positions = select(flat, kept)
    size = value_bytes(codec.values, kept)
    encode_values(codec.values, chosen, target[:size])
    form, data = encode_positions(positions, count, squeeze=squeeze)
    target[size : size + len(data)] = data
    return Written(kept, int(form), len(data)), size + len(data)


def decode(codec: Codec, written: Written, data: memoryview, target: Tensor) -> None:
    """Fill `target`, a CPU tensor of one dimension, from `length` bytes. What was not kept is zero.

    Raises ProtocolError for whatever `encode` does not write; `target` is of no use then.
    """
    count = len(target)
    if codec.values is None or not target.is_floating_point():
        if count:
            target.copy_(torch.frombuffer(data, dtype=target.dtype))
        return
    if not _is_sparse(codec, written.kept, count):
        target.copy_(decode_values(codec.values, data, count))
        return
    size = value_bytes(codec.values, written.kept)
    positions = decode_positions(written.form, data[size:], written.kept, count)
    found = decode_values(codec.values, data[:size], written.kept)
    target.zero_()
    target[torch.from_numpy(positions)] = found.to(target.dtype)


def _is_sparse(codec: Codec, kept: int, count: int) -> bool:
    return codec.sparse and kept < count


def kept_of(count: int, share: float) -> int:
    """Elements to keep of a tensor: at least one."""
    return min(count, max(1, round(count * share)))


__all__ = ["Codec", "Written", "decode", "encode", "kept_of", "length", "room"]
