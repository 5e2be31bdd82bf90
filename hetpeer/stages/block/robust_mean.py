"""A mean that a few cannot move far: centered clipping (Karimireddy, He and Jaggi, Learning from history for Byzantine robust optimization, ICML 2021,
algorithm 1), as every reducer can do it for its shard by itself (Gorbunov et al., Secure distributed training at scale, ICML 2022).

Every step of it is a weighted mean of the parts, and the distances that decide the weights follow from their inner products alone. So the vectors are read once for
those, and once for the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

ROUNDS: Final = 20
"""The weights hardly change after that."""
CHUNK: Final = 1 << 15
"""Elements that are float64 at a time."""

FEWEST: Final = 3
"""Of fewer nobody is far from the others."""
PRECISION: Final = 1e-12
"""Of a square of a distance, relative to those that it is the difference of."""

Matrix = NDArray[np.float64]


def centered_clip(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """As many times the clipped mean of `parts` (1-D float32, of one length, finite) as there are: it takes the place of their sum.

    It begins with the part that is nearest to most others, and goes by the mean of what each is away from it, but by none farther than the middle one is away.
    So less than half of them, whatever they are, move it by no more than the others are apart. Of one or two parts it is the mean. One reducer computes it for
    everybody, so its bits need not be the same on other machines.
    """
    weights = clipped(products(parts)) if len(parts) >= FEWEST else np.full(len(parts), 1.0 / len(parts))
    total = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        if weight:
            total.add_(part, alpha=float(len(parts) * weight))
    return total


def products(parts: Sequence[torch.Tensor], origin: int = 0) -> Matrix:
    """Inner products of what `parts` are away from one of them: differences are small beside the parts themselves. Should that one be so far away that nothing is left
    of the differences between the others, another is taken.
    """
    found = np.zeros((len(parts), len(parts)))
    for begin in range(0, len(parts[0]), CHUNK):
        piece = torch.stack([part[begin : begin + CHUNK] for part in parts]).double()
        piece -= piece[origin].clone()
        found += (piece @ piece.T).numpy()
    middle, away = nearest(found)
    too_far = away**2 < PRECISION * found[middle, middle]
    return products(parts, middle) if too_far and not origin else found


def distances(inner: Matrix) -> Matrix:
    """Of each from each."""
    squares = np.diag(inner)
    return np.asarray(np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2.0 * inner, 0.0)))


def nearest(inner: Matrix) -> tuple[int, float]:
    """Which one is nearest to most others, and how far the middle one of them is."""
    middle = np.median(distances(inner), axis=1)
    return int(np.argmin(middle)), float(np.min(middle))


def clipped(inner: Matrix) -> NDArray[np.float64]:
    """Weights of the vectors whose inner products these are, in their clipped mean; they add up to 1."""
    count, squares = len(inner), np.diag(inner)
    weights = np.zeros(count)
    weights[nearest(inner)[0]] = 1.0
    for _ in range(ROUNDS):
        lengths = np.sqrt(np.maximum(squares - 2.0 * inner @ weights + weights @ inner @ weights, 0.0))
        radius = np.median(lengths)
        shares = np.divide(radius, lengths, out=np.ones(count), where=lengths > radius) / count
        weights = weights * (1.0 - shares.sum()) + shares
    return weights
