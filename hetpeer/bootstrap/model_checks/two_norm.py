"""The 2-norm of large tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def two_norm(tensors: Iterable[Tensor]) -> float:
    """2-norm of real tensors together; 0 of none.

    Rows are added up in their own format, and the rest in float64. On a processor torch 2.13.0 adds all
    squares of a float32 tensor up in float32, one after the other: of 155 million the norm comes out 2 % too
    small.

        two_norm([torch.ones(3), torch.ones(2, 3)])  # 3.0
    """
    return math.hypot(*(float(torch.linalg.vector_norm(one, dim=-1).double().norm()) for one in tensors))
