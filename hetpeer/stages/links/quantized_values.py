"""Floating-point values in fewer bytes: halves, or steps of 8 or 4 bits with a scale for each group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hetpeer.dht.base.errors import LocalError, ProtocolError
from hetpeer.stages.links.codec import GROUPS, Values

STEPS = {Values.INT8: 127, Values.INT4: 7}
"""Steps of a group's largest value."""

_HALVES = {Values.BF16: torch.bfloat16, Values.FP16: torch.float16}


def encode_values(values: Values, flat: Tensor, target: memoryview) -> None:
    """Write a finite 1-D tensor to `target`, of `value_bytes` bytes.

    Raises LocalError HP-NUM-002 if a value is beyond the range of fp16.
    """
    flat = flat.detach().float()
    if values in _HALVES:
        halves = flat.to(_HALVES[values])
        if values is Values.FP16 and not torch.isfinite(halves).all():
            raise LocalError(
                "HP-NUM-002", "a value is beyond the range of fp16", why="the run sends fp16", fix="use bf16"
            )
        _bytes_at(target, halves.dtype).copy_(halves)
        return
    group, most = GROUPS[values], STEPS[values]
    groups = -(-len(flat) // group)
    padded = (
        flat if len(flat) == groups * group else torch.cat([flat, flat.new_zeros(groups * group - len(flat))])
    )
    table = padded.view(groups, group)
    # Not divided by `most`: a GPU multiplies by the reciprocal anyway, and both must write the same bytes.
    scales = _rounded_up(table.abs().amax(1) * (1 / most))
    inverse = torch.where(scales > 0, 1 / scales, 0.0).nan_to_num(posinf=0.0)
    steps = (table * inverse[:, None]).round_().clamp_(-most, most).to(torch.int8).view(-1)
    _bytes_at(target[: 2 * groups], torch.bfloat16).copy_(scales)
    place = _bytes_at(target[2 * groups :], torch.int8)
    place.copy_(steps[: len(flat)] if values is Values.INT8 else _packed(steps)[: len(place)])


def decode_values(values: Values, data: memoryview, count: int) -> Tensor:
    """`count` float32 values on the CPU from `value_bytes` bytes. Raises ProtocolError if one is
    not finite.
    """
    if values in _HALVES:
        found = _bytes_at(data, _HALVES[values]).float()
    else:
        group = GROUPS[values]
        groups = -(-count // group)
        scales = _bytes_at(data[: 2 * groups], torch.bfloat16).float()
        steps = _bytes_at(data[2 * groups :], torch.int8)
        steps = steps if values is Values.INT8 else _unpacked(steps)[:count]
        full = count // group * group
        found = torch.empty(count)
        torch.mul(
            steps[:full].view(-1, group), scales[: full // group, None], out=found[:full].view(-1, group)
        )
        if full < count:
            torch.mul(steps[full:], scales[-1], out=found[full:])
    # A sum of finite values is finite, unless it overflows: then each value is checked.
    if not torch.isfinite(found.sum()) and not torch.isfinite(found).all():
        raise ProtocolError("a value that is not finite")
    return found


def _packed(steps: Tensor) -> Tensor:
    """Two steps in a byte, the first in its lower half; their number is even."""
    return (steps[0::2] & 0x0F) | (steps[1::2] << 4)


def _unpacked(pairs: Tensor) -> Tensor:
    return torch.stack([(pairs << 4) >> 4, pairs >> 4], dim=1).view(-1)


def _rounded_up(scales: Tensor) -> Tensor:
    """Round up to a bfloat16, so that no value is beyond 127 steps."""
    bits = scales.view(torch.int32)
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32)


def _bytes_at(data: Any, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
