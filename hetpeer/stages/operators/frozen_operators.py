"""Frozen tensors that are stored in fewer bytes, and made float again where a block uses them.

`bf16` is the nearest bfloat16. `int8` and `int4` have one float32 scale for each 64 numbers in a row, the
largest of them over 127 or 7, and the nearest whole multiple of it for each number. Making a number again is
one IEEE multiplication, so all devices get the same bits. A result has at most twice as many elements as the
stored tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hetpeer.stages.operators.operator_family import Operator

GROUP = 64
"""Numbers that share a scale."""
WIDEN, FROM_INT8, FROM_INT4 = "hetpeer.widen", "hetpeer.from_int8", "hetpeer.from_int4"
ZERO = 8
"""Half a byte that stands for 0."""


def widen(stored: Tensor, product: bool) -> Tensor:
    """A bfloat16 tensor as float32; `product` as in `_made`."""
    _check(stored, torch.bfloat16)
    return _made(stored, product)


def from_int8(stored: Tensor, scales: Tensor, product: bool) -> Tensor:
    """The numbers of int8 [...], each times the scale of its group; `scales`: float32 [groups]."""
    _check(stored, torch.int8)
    return _made(_scaled(stored, scales).view(stored.shape), product)


def from_int4(stored: Tensor, scales: Tensor, product: bool) -> Tensor:
    """The numbers of uint8 [..., n], two in a byte, the lower half first → [..., 2 · n]."""
    _check(stored, torch.uint8)
    halves = torch.stack([stored & 15, stored >> 4], dim=-1).to(torch.int8) - ZERO
    return _made(_scaled(halves, scales).view(*stored.shape[:-1], 2 * stored.shape[-1]), product)


def _check(stored: Tensor, expected: torch.dtype) -> None:
    if stored.dtype != expected or not stored.dim():
        raise ValueError(f"a stored tensor is {expected}, with one dimension or more")


def _made(tensor: Tensor, product: bool) -> Tensor:
    """`tensor` as float32; under autocast as bfloat16 if only products read it, as autocast itself would."""
    kind = tensor.device.type
    low = product and kind != "meta" and torch.is_autocast_enabled(kind)
    return tensor.to(torch.bfloat16 if low else torch.float32)


def _scaled(numbers: Tensor, scales: Tensor) -> Tensor:
    """int8 numbers times their scales, float32, flat."""
    count = numbers.numel()
    if scales.dtype != torch.float32 or scales.shape != (-(-count // GROUP),):
        raise ValueError(f"{count} numbers have {-(-count // GROUP)} float32 scales")
    flat, full = numbers.reshape(-1), count // GROUP * GROUP
    scaled = (flat[:full].view(-1, GROUP) * scales[: full // GROUP, None]).view(-1)
    return scaled if full == count else torch.cat([scaled, flat[full:] * scales[-1]])


FAMILY: Mapping[str, Operator] = {
    WIDEN: Operator(widen),
    FROM_INT8: Operator(from_int8),
    FROM_INT4: Operator(from_int4),
}
"""Operators whose results a block need not keep: it makes them again (block/remade_values.py)."""
