"""Encoding and decoding of tensors in fewer bytes (docs/links.md).

codec.py defines codecs and their sizes; here are the bytes themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.links.codec import Codec, EncodedTensor
from hetpeer.stages.links.sparse_positions import decode_positions, encode_positions
from hetpeer.stages.links.squeezing import inflated, squeezed
from hetpeer.stages.links.top_k import select
from hetpeer.stages.links.value_codec import ValueCodec, values_at


def encode(
    codec: Codec, flat: Tensor, kept: int, target: memoryview, *, squeeze: bool = True
) -> tuple[EncodedTensor, int]:
    """Write a finite 1-D tensor to the beginning of `target`; returns the head's entry and the bytes written.

    `kept` elements are kept if the codec is sparse (0 < kept ≤ len(flat)); `target` has at least `room`
    bytes. `squeeze`: spend time on shorter values and positions. Raises LocalError HP-NUM-002 for a value
    that the codec cannot represent.
    """
    count = len(flat)
    if codec.values is None or not flat.is_floating_point():
        size = count * flat.element_size()
        values_at(target[:size], flat.dtype).copy_(flat.detach())
        return EncodedTensor(count), size
    if not codec.selects(kept, count):
        size, value_bytes = _encode_values(codec.values, flat, target, squeeze=squeeze)
        return EncodedTensor(count, value_bytes=value_bytes), size
    chosen, positions = select(flat, kept)
    size, value_bytes = _encode_values(codec.values, chosen, target, squeeze=squeeze)
    form, data = encode_positions(positions, count, squeeze=squeeze)
    target[size : size + len(data)] = data
    return EncodedTensor(kept, int(form), len(data), value_bytes), size + len(data)


def decode(codec: Codec, written: EncodedTensor, data: memoryview, target: Tensor) -> None:
    """Fill `target`, a 1-D CPU tensor, from `length` bytes. Elements that were not kept are zero.

    Raises ProtocolError for bytes that `encode` does not write; the content of `target` is undefined then.
    """
    count = len(target)
    if codec.values is None or not target.is_floating_point():
        target.copy_(values_at(data, target.dtype))
        return
    if not codec.selects(written.kept, count):
        target.copy_(_decode_values(codec.values, written, data))
        return
    size = written.value_bytes or codec.values.nbytes(written.kept)
    positions = decode_positions(written.form, data[size:], written.kept, count)
    found = _decode_values(codec.values, written, data[:size])
    target.zero_()
    target[torch.from_numpy(positions)] = found.to(target.dtype)


def _encode_values(values: ValueCodec, flat: Tensor, target: memoryview, *, squeeze: bool) -> tuple[int, int]:
    """Write `flat`; returns the bytes written, and again if they are squeezed (0: they are not)."""
    size = values.nbytes(len(flat))
    values.encode(flat.detach().float(), target[:size])
    if squeeze and values.squeezable and len(shorter := squeezed(target[:size])) < size:
        target[: len(shorter)] = shorter
        return len(shorter), len(shorter)
    return size, 0


def _decode_values(values: ValueCodec, written: EncodedTensor, data: memoryview) -> Tensor:
    """All kept values. Raises ProtocolError for what `_encode_values` does not write."""
    size = values.nbytes(written.kept)
    if written.value_bytes:
        data = memoryview(bytearray(inflated(data, size)))  # torch reads writable memory only
        if len(data) != size:
            raise ProtocolError(f"squeezed values of {len(data)} bytes instead of {size}")
    return _finite(values.decode(data, written.kept))


def _finite(found: Tensor) -> Tensor:
    # A sum of finite values is finite, unless it overflows: then each value is checked.
    if not torch.isfinite(found.sum()) and not torch.isfinite(found).all():
        raise ProtocolError("a value that is not finite")
    return found
