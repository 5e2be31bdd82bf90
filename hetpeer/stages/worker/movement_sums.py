"""The sum of what clusters send of their movements, most of which is zeros.

A cluster sends the few largest numbers of what it has moved (sparse_movement.py), so that most numbers that
are sent come from one of the clusters. The others have moved, too, but not as far. Counting them as zeros
makes the run as slow as one that takes a fraction of every step. So each counts for a part of the mean of
those that have sent something.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

UNSENT: Final = 0.75
"""Movement that a cluster is taken to have made where it sent nothing, of the mean of those that sent."""


def summed_movements(parts: Sequence[Tensor]) -> Tensor:
    """Sum of `parts` (1-D float32 of one length); where one is 0 it counts for UNSENT of the mean of others.

    Where k of N parts are not 0 that is their sum, added up in order, times 1 + UNSENT (N / k - 1): a
    multiplication by one float32 number.

    >>> summed_movements([torch.tensor([1.0, 0.0]), torch.tensor([3.0, 2.0])])
    tensor([4.0000, 3.5000])
    >>> summed_movements([torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([0.0])])
    tensor([3.2500])
    """
    total, sent = parts[0].clone(), parts[0].ne(0).to(torch.int32)
    for part in parts[1:]:
        total.add_(part)
        sent.add_(part.ne(0))
    factors = [1.0] + [1.0 + UNSENT * (len(parts) / count - 1.0) for count in range(1, len(parts) + 1)]
    return total.mul_(torch.tensor(factors, dtype=torch.float32)[sent])
