"""The k largest elements of a tensor, exactly k, without sorting it.

A threshold guessed from a sample leaves little more than k candidates. The k-th largest of them is that of
the whole tensor if at least k passed. A wrong guess costs time, never exactness. Ties go to lower positions.
A tensor is searched where it is: on its device.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAMPLE = 1 << 16
"""Elements from which a CPU guesses the first threshold."""
SMALL_SAMPLE = 1 << 12
"""The same for a GPU, which sorts so many in one kernel; the more candidates cost it less."""
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
        sample = magnitudes[:: _stride(len(magnitudes), SAMPLE)]
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
    """Positions of the `k` largest, on a GPU.

    torch.topk reads a tensor once for each digit (radix selection). Here it reads the candidates alone, which
    the threshold has left over in the order of their positions.
    """
    candidates = _candidates(magnitudes, k) if len(magnitudes) > SMALL else None
    found = magnitudes if candidates is None else magnitudes[candidates]
    least = found.topk(k, sorted=False).values.min()
    within = (found >= least).nonzero().flatten()
    if len(within) > k:  # of those that equal the least, the lower positions
        here = found[within]
        more = (here > least).logical_or_((here == least).cumsum(0) <= k - (here > least).sum())
        within = within[more]
    return within if candidates is None else candidates[within]


def _candidates(magnitudes: Tensor, k: int) -> Tensor | None:
    """Positions of a little more than the `k` largest; None if the guess left too few."""
    sample = magnitudes[:: _stride(len(magnitudes), SMALL_SAMPLE)]
    rank = _rank(len(sample), k / len(magnitudes))
    if rank >= len(sample):
        return None
    passed = (magnitudes >= sample.sort(descending=True).values[rank - 1]).nonzero().flatten()
    return passed if len(passed) >= k else None


def _stride(count: int, sample: int) -> int:
    """Distance of the sample's elements; without small factors, so that it meets different channels."""
    stride = max(count // sample, 1) | 1
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
