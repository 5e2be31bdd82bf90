"""Bottleneck perfect matchings: pairs between two groups so that the slowest pair is as fast as possible.
Pure.

DT-FM, Eq. 3 (Yuan et al., NeurIPS 2022, arXiv 2206.01288, section 3.3). Many matchings of one size are solved
at once: numpy's price for a call is that of a thousand numbers.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

EXACT = 9
"""Largest groups matched exactly in bulk, by all 2^R subsets. pipeline_rows.py searches larger ones."""


def bottlenecks(costs: Floats) -> Floats:
    """The least possible maximum of a perfect matching, for each of B cost matrices; (R, R, B) → B, R ≤
    EXACT.

    The first r rows matched to the columns of a subset: best[subset] = min over its columns j of
    max(best[subset - j], cost[r, j]).
    """
    size = costs.shape[0]
    best = np.full((1, costs.shape[2]), -np.inf)
    for row in range(size):
        before, column = _layer(size, row)
        best = np.maximum(best[before], costs[row][column]).min(axis=1)
    least: Floats = best[0]
    return least


@cache
def _layer(size: int, row: int) -> tuple[Ints, Ints]:
    """For each subset of row + 1 columns and each column in it: place of the rest, and the column."""
    smaller = {subset: place for place, subset in enumerate(combinations(range(size), row))}
    subsets = list(combinations(range(size), row + 1))
    before = [[smaller[tuple(c for c in subset if c != column)] for column in subset] for subset in subsets]
    return np.array(before, dtype=np.intp), np.array(subsets, dtype=np.intp)


def bounds(costs: Floats) -> Floats:
    """Lower bounds (R, R, B) → B: no matching is better than the best partner of the worst device."""
    least: Floats = np.maximum(costs.min(axis=0).max(axis=0), costs.min(axis=1).max(axis=0))
    return least


def matched(costs: Floats, most: float = np.inf) -> tuple[float, Ints]:
    """(maximum, column of each row) of a perfect matching of one (R, R) matrix with the least maximum. Any
    size.

    Binary search over thresholds between the bound and the largest number, or `most` if a matching no worse
    than that is known to exist.
    """
    least = bounds(costs[:, :, None])[0]
    values = np.unique(costs[(costs >= least) & (costs <= most)])
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if (_pairs(costs <= values[middle]) >= 0).all():
            high = middle
        else:
            low = middle + 1
    return float(values[low]), _pairs(costs <= values[low])


def _pairs(allowed: NDArray[np.bool_]) -> Ints:
    pairs: Ints = maximum_bipartite_matching(csr_matrix(allowed), perm_type="column").astype(np.intp)
    return pairs
