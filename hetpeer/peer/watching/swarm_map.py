"""Places of peers on a plane by the time between them. Pure.

Classical multidimensional scaling (Torgerson 1952): the plane in which squared distances are, in the least
squares sense of their inner products, nearest to the squared times. The input is a matrix, so that it may
come from measured round trips or from network coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
USUAL_S = 0.02
"""Seconds one way where nobody has measured anything."""
TINY_S = 1e-9
"""Extent of a map whose peers are all at one point."""
ROUNDS = 200
"""Rounds in which points that lie too near to each other are pushed apart."""


def completed(latency_s: Floats) -> Floats:
    """(N, N) one-way seconds without gaps, from a matrix with NaN for pairs that nobody has measured.

    Of both directions the mean counts. A gap becomes the shortest detour over measured pairs, and the median
    of all measured ones where there is none. The diagonal is 0.

    >>> nan = float("nan")
    >>> completed(np.array([[0, 0.01, nan], [0.03, 0, 0.05], [nan, nan, 0]])).round(3).tolist()
    [[0.0, 0.02, 0.07], [0.02, 0.0, 0.05], [0.07, 0.05, 0.0]]
    """
    both = np.stack([latency_s, latency_s.T])
    known = np.isfinite(both)
    count = known.sum(axis=0)
    mean = np.where(known, both, 0.0).sum(axis=0) / np.maximum(count, 1)
    measured = count > 0
    np.fill_diagonal(measured, False)
    usual = float(np.median(mean[measured])) if measured.any() else USUAL_S
    found = np.where(measured, mean, np.inf)
    np.fill_diagonal(found, 0.0)
    detours = found.copy()
    for over in range(len(found)):  # Floyd and Warshall
        np.minimum(detours, detours[:, over, None] + detours[None, over, :], out=detours)
    found = np.where(np.isfinite(found), found, detours)
    return np.where(np.isfinite(found), found, usual)


def positions(latency_s: Floats) -> Floats:
    """(N, 2) points, in seconds, whose distances are like the symmetric (N, N) matrix of one-way seconds.

    >>> times = np.array([[0, 3, 4], [3, 0, 5], [4, 5, 0]], float)
    >>> points = positions(times)
    >>> np.linalg.norm(points[:, None] - points[None], axis=2).round(6).tolist()
    [[0.0, 3.0, 4.0], [3.0, 0.0, 5.0], [4.0, 5.0, 0.0]]
    """
    count = len(latency_s)
    if count < 2:
        return np.zeros((count, 2))
    centring = np.eye(count) - 1.0 / count
    inner = -0.5 * centring @ np.square(latency_s) @ centring
    values, vectors = np.linalg.eigh(inner)
    largest = np.argsort(values)[::-1][:2]
    points = vectors[:, largest] * np.sqrt(np.maximum(values[largest], 0.0))
    return np.pad(points, ((0, 0), (0, 2 - points.shape[1])))


def turned_like(points: Floats, before: Floats, same: Sequence[tuple[int, int]]) -> Floats:
    """`points` turned and mirrored so that those in `same`, (index, index in `before`), lie as before.

    Orthogonal Procrustes. A map that is drawn again every second must not spin. With fewer than two in common
    the points stay as they are.
    """
    if len(same) < 2:
        return points
    here, there = points[[one for one, _ in same]], before[[other for _, other in same]]
    left, _, right = np.linalg.svd((here - here.mean(axis=0)).T @ (there - there.mean(axis=0)))
    return np.asarray(points @ left @ right)


def spread(points: Floats, width: float, height: float, least: float) -> tuple[Floats, float]:
    """`points` scaled alike in both directions into [0, width] x [0, height], no two nearer than `least`, and
    the scale: pixels of a second, 0 if all are at one point.

    Peers of one house are as good as at one point, so those too near are pushed apart, by as little as it
    takes, as far as there is room.
    """
    if len(points) < 2:
        return np.full((len(points), 2), (width / 2, height / 2)), 0.0
    low, high = points.min(axis=0), points.max(axis=0)
    size = high - low
    scale = (
        min(side / extent for side, extent in ((width, size[0]), (height, size[1])) if extent > TINY_S)
        if (size.max() > TINY_S)
        else 0.0
    )
    placed = (points - (low + high) / 2) * scale + (width / 2, height / 2)
    # complex numbers are a third of the work; a spiral by the golden angle: no two points are alike
    turned = np.arange(len(placed)) * np.pi * (3.0 - np.sqrt(5.0))
    at = placed @ (1.0, 1.0j) + 0.05 * least * np.sqrt(np.arange(len(placed))) * np.exp(1.0j * turned)
    for _ in range(ROUNDS):
        gaps = at[:, None] - at[None, :]
        far = np.abs(gaps)
        np.fill_diagonal(far, np.inf)
        lacking = np.maximum(least - far, 0.0)
        if not lacking.any():
            break
        push = (lacking / np.maximum(far, TINY_S) * gaps).sum(axis=1) / 2
        at += push * np.minimum(1.0, 0.5 * least / np.maximum(np.abs(push), TINY_S))
        at = np.clip(at.real, 0.0, width) + 1.0j * np.clip(at.imag, 0.0, height)
    return np.stack([at.real, at.imag], axis=1), float(scale)
