"""Centered clipping: a mean that a few parts cannot move far (Karimireddy, He and Jaggi, ICML 2021, algorithm
1).

Every reducer can do it for its shard alone (Gorbunov et al., Secure distributed training at scale, ICML
2022). Every iteration is a weighted mean of the parts, and the distances that decide the weights follow from
their inner products. So the vectors are read once for those, and once for the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

ROUNDS: Final = 20
"""Iterations; the weights hardly change after that."""
CHUNK: Final = 1 << 15
"""Elements converted to float64 at a time."""

FEWEST: Final = 3
"""With fewer parts none is far from the others."""
PRECISION: Final = 1e-12
"""Relative precision of a squared distance, compared with the squares whose difference it is."""

Matrix = NDArray[np.float64]


def centered_clip(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The clipped mean of `parts` times their number, in place of their sum.

    `parts` are 1-D float32 tensors of one length, finite. It begins with the part nearest to most others and
    moves by the mean of the parts' differences, each clipped to the median length. So a minority moves it by
    no more than the distance between the others. For one or two parts it is the mean. One reducer computes it
    for everybody, so its bits may differ between machines.
    """
    weights = clipped(products(parts)) if len(parts) >= FEWEST else np.full(len(parts), 1.0 / len(parts))
    total = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        if weight:
            total.add_(part, alpha=float(len(parts) * weight))
    return total


def products(parts: Sequence[torch.Tensor], origin: int = 0) -> Matrix:
    """Inner products of the differences between `parts` and one of them; these are small compared with the
    parts.

    If that part is so far away that nothing is left of the differences between the others, another one is
    taken.
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
    """Pairwise distances."""
    squares = np.diag(inner)
    return np.asarray(np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2.0 * inner, 0.0)))


def nearest(inner: Matrix) -> tuple[int, float]:
    """(index of the part nearest to most others, its median distance from them)."""
    middle = np.median(distances(inner), axis=1)
    return int(np.argmin(middle)), float(np.min(middle))


def clipped(inner: Matrix) -> NDArray[np.float64]:
    """Weights in the clipped mean of vectors with these inner products; they add up to 1."""
    count, squares = len(inner), np.diag(inner)
    weights = np.zeros(count)
    weights[nearest(inner)[0]] = 1.0
    for _ in range(ROUNDS):
        lengths = np.sqrt(np.maximum(squares - 2.0 * inner @ weights + weights @ inner @ weights, 0.0))
        radius = np.median(lengths)
        shares = np.divide(radius, lengths, out=np.ones(count), where=lengths > radius) / count
        weights = weights * (1.0 - shares.sum()) + shares
    return weights
