"""Encoding and decoding of tensors in fewer bytes (docs/links.md).

codec.py defines codecs and their sizes; here are the bytes themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetpeer.stages.links.codec import Codec, EncodedTensor, value_bytes
from hetpeer.stages.links.quantized_values import decode_values, encode_values
from hetpeer.stages.links.sparse_positions import decode_positions, encode_positions
from hetpeer.stages.links.top_k import select


def encode(
    codec: Codec, flat: Tensor, kept: int, target: memoryview, *, squeeze: bool = True
) -> tuple[EncodedTensor, int]:
    """Write a finite 1-D tensor to the beginning of `target`; returns the head's entry and the bytes written.

    `kept` elements are kept if the codec is sparse (0 < kept ≤ len(flat)); `target` has at least `room`
    bytes. `squeeze`: spend time on shorter positions. Raises LocalError HP-NUM-002 for a value beyond fp16.
    """
    count = len(flat)
    if codec.values is None or not flat.is_floating_point():
        size = count * flat.element_size()
        torch.frombuffer(target[:size], dtype=flat.dtype).copy_(flat.detach()) if size else None
        return EncodedTensor(count), size
    if not codec.selects(kept, count):
        size = value_bytes(codec.values, count)
        encode_values(codec.values, flat, target[:size])
        return EncodedTensor(count), size
    chosen, positions = select(flat, kept)
    size = value_bytes(codec.values, kept)
    encode_values(codec.values, chosen, target[:size])
    form, data = encode_positions(positions, count, squeeze=squeeze)
    target[size : size + len(data)] = data
    return EncodedTensor(kept, int(form), len(data)), size + len(data)


def decode(codec: Codec, written: EncodedTensor, data: memoryview, target: Tensor) -> None:
    """Fill `target`, a 1-D CPU tensor, from `length` bytes. Elements that were not kept are zero.

    Raises ProtocolError for bytes that `encode` does not write; the content of `target` is undefined then.
    """
    count = len(target)
    if codec.values is None or not target.is_floating_point():
        if count:
            target.copy_(torch.frombuffer(data, dtype=target.dtype))
        return
    if not codec.selects(written.kept, count):
        target.copy_(decode_values(codec.values, data, count))
        return
    size = value_bytes(codec.values, written.kept)
    positions = decode_positions(written.form, data[size:], written.kept, count)
    found = decode_values(codec.values, data[:size], written.kept)
    target.zero_()
    target[torch.from_numpy(positions)] = found.to(target.dtype)
