"""Vectors on which peers must agree to the bit: squared norms, finiteness.

`torch.sum` adds in an order that depends on threads and vector width, so two holders of the same gradient
could vote for different norms. Here every addition is element-wise and has a fixed place in the tree, so any
machine gets equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

LANES = 1 << 16
"""Partial sums kept side by side (a power of two): 512 KiB of float64, which fits a core's cache."""


class SquaredNorm:
    """Sum of squares of a 1-D float32 vector in float64, the same bits on every machine.

    Element i is added to lane i mod `LANES` in ascending order, then the lanes are halved until one is left.
    A float32's square is exact in float64 and cannot overflow, so the result is finite exactly if every
    element is, and a fused multiply-add gives the same bits as a product and a sum.

    norm = SquaredNorm(torch.device("cpu"))
    for piece in vector.split(1000):
        norm.add(piece)
    norm.value()
    """

    def __init__(self, device: torch.device) -> None:
        self._lanes = torch.zeros(LANES, dtype=torch.float64, device=device)
        self._wide = torch.empty_like(self._lanes)
        self._count = 0

    def add(self, piece: torch.Tensor) -> None:
        """Add the next elements of the vector."""
        begin = 0
        while begin < len(piece):
            lane = self._count % LANES
            chunk = piece[begin : begin + LANES - lane]
            wide = self._wide[: len(chunk)].copy_(chunk)
            self._lanes[lane : lane + len(chunk)].addcmul_(wide, wide)
            self._count += len(chunk)
            begin += len(chunk)

    def value(self) -> float:
        """The sum of what was added so far."""
        lanes = self._lanes
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = lanes[:half] + lanes[half:]
        return float(lanes)


def squared_norm(flat: torch.Tensor) -> float:
    """The `SquaredNorm` of a vector."""
    norm = SquaredNorm(flat.device)
    norm.add(flat)
    return norm.value()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. An empty tensor is finite."""
    return first_not_finite([tensor]) is None


@torch.no_grad()
def first_not_finite(tensors: Sequence[torch.Tensor]) -> int | None:
    """Index of the first tensor with a NaN or an infinity; None if all are finite.

    One pass over each, no temporaries. All are looked at on their device, and it is waited for once. A sum is
    made faster than extremes are found, and is finite only if all elements are; if it is not, it may have
    been too large.
    """
    looked = [at for at, tensor in enumerate(tensors) if tensor.numel()]
    sums = _numbers([tensors[at].sum() for at in looked])
    suspects = [at for at, total in zip(looked, sums, strict=True) if not math.isfinite(total)]
    extremes = _numbers([extreme for at in suspects for extreme in torch.aminmax(tensors[at])])  # NaN is both
    return next((suspects[n // 2] for n, number in enumerate(extremes) if not math.isfinite(number)), None)


def _numbers(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Values of `scalars`; their device is waited for once."""
    return torch.stack([scalar.double() for scalar in scalars]).tolist() if scalars else []
