"""The k largest elements of a tensor, exactly k, without sorting it.

On a CPU a threshold guessed from a sample leaves little more than k candidates. The k-th largest of them is
that of the whole tensor if at least k passed. A wrong guess costs time, never exactness. Ties go to lower
positions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAMPLE = 1 << 16
"""Elements from which the first threshold is guessed."""
CAUTION = 3.0
"""Standard deviations of the sample's count by which the guess lets more through than k."""
SMALL = 1 << 15
"""Most elements of a tensor that is searched as a whole."""

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float32]]


def largest(flat: Tensor, k: int) -> Tensor:
    """Positions (int64, rising, on the same device) of the `k` elements of largest magnitude; 0 < k ≤
    len(flat).

    `flat` is 1-D and finite.
    """
    if k >= len(flat):
        return torch.arange(len(flat), device=flat.device)
    magnitudes = flat.detach().float().abs()
    if flat.device.type == "cpu":
        return torch.from_numpy(_largest_here(magnitudes.numpy(), k))
    return _largest_there(magnitudes, k)


def _largest_here(magnitudes: Floats, k: int) -> Indices:
    """Positions of the `k` largest, on a CPU: numpy finds them twice as fast as torch."""
    candidates = None
    if len(magnitudes) > SMALL:
        sample = magnitudes[:: _stride(len(magnitudes))]
        rank = _rank(len(sample), k / len(magnitudes))
        if rank < len(sample):
            threshold = np.partition(sample, len(sample) - rank)[len(sample) - rank]
            passed = np.flatnonzero(magnitudes >= threshold)
            candidates = passed if len(passed) >= k else None
    found = magnitudes if candidates is None else magnitudes[candidates]
    least = np.partition(found, len(found) - k)[len(found) - k]
    chosen = found > least
    ties = np.flatnonzero(found == least)[: k - int(np.count_nonzero(chosen))]
    chosen[ties] = True
    within: Indices = np.flatnonzero(chosen)
    return within if candidates is None else candidates[within]


def _largest_there(magnitudes: Tensor, k: int) -> Tensor:
    """Positions of the `k` largest, on a GPU: torch's own selection is fastest, but does not order ties."""
    least = magnitudes.topk(k, sorted=False).values.min()
    chosen = magnitudes > least
    ties = (magnitudes == least).nonzero().flatten()[: k - int(chosen.sum())]
    chosen[ties] = True
    return chosen.nonzero().flatten()


def _stride(count: int) -> int:
    """Distance of the sample's elements; without small factors, so that it meets different channels."""
    stride = max(count // SAMPLE, 1) | 1
    while stride > 1 and math.gcd(stride, 2 * 3 * 5 * 7 * 11 * 13) > 1:
        stride += 2
    return stride


def _rank(sample: int, share: float) -> int:
    """Sample elements that should pass so that at least k of the tensor do, almost surely."""
    expected = sample * share
    return math.ceil(expected + CAUTION * math.sqrt(expected) + CAUTION)


def select(flat: Tensor, k: int) -> tuple[Tensor, Any]:
    """The `k` largest values in the order of their positions, and these positions in main memory (int64)."""
    positions = largest(flat, k)
    return flat[positions], positions.cpu().numpy()
