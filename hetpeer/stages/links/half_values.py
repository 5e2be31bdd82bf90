"""Values as halves: bfloat16 or float16."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.links.value_codec import ValueCodec, values_at

if TYPE_CHECKING:
    from torch import Tensor


class BF16(ValueCodec):
    """bfloat16: float32's range, 8 bits of mantissa."""

    name = "bf16"
    tolerance = 0.05

    def nbytes(self, count: int) -> int:
        return 2 * count

    def encode(self, flat: Tensor, target: memoryview) -> None:
        halves = flat.bfloat16()
        values_at(target, halves.dtype).copy_(halves)

    def decode(self, data: memoryview, count: int) -> Tensor:
        import torch

        return values_at(data[: 2 * count], torch.bfloat16).float()


class FP16(ValueCodec):
    """float16: 11 bits of mantissa, values up to 65504."""

    name = "fp16"
    tolerance = 0.05
    with_top_k = False

    def nbytes(self, count: int) -> int:
        return 2 * count

    def encode(self, flat: Tensor, target: memoryview) -> None:
        import torch

        halves = flat.half()
        if not torch.isfinite(halves).all():
            raise LocalError(
                "HP-NUM-002", "a value is beyond the range of fp16", why="the run sends fp16", fix="use bf16"
            )
        values_at(target, torch.float16).copy_(halves)

    def decode(self, data: memoryview, count: int) -> Tensor:
        import torch

        return values_at(data[: 2 * count], torch.float16).float()
