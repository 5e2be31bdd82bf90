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


def squared_norm(flat: torch.Tensor) -> float:
    """Sum of squares of a 1-D float32 tensor in float64, the same bits on every machine.

    Element i is added to lane i mod `LANES` in ascending order, then the lanes are halved until one is left.
    A float32's square is exact in float64 and cannot overflow, so the result is finite exactly if every
    element is.
    """
    lanes = torch.zeros(LANES, dtype=torch.float64, device=flat.device)
    for begin in range(0, len(flat), LANES):
        chunk = flat[begin : begin + LANES]
        square = chunk.double()
        lanes[: len(chunk)].add_(square.mul_(square))
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. An empty tensor is finite."""
    return first_not_finite([tensor]) is None


@torch.no_grad()
def first_not_finite(tensors: Sequence[torch.Tensor]) -> int | None:
    """Index of the first tensor with a NaN or an infinity; None if all are finite.

    One pass over each, no temporaries. All are looked at on their device, and it is waited for once.
    """
    looked = [at for at, tensor in enumerate(tensors) if tensor.numel()]
    extremes = [extreme for at in looked for extreme in torch.aminmax(tensors[at])]  # NaN is both of them
    numbers = torch.stack(extremes).tolist() if extremes else []
    return next((looked[n // 2] for n, number in enumerate(numbers) if not math.isfinite(number)), None)
