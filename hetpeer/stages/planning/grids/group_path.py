"""Matchings between two groups of a grid, and the shortest path through all its groups.

Pure. DT-FM, Eq. 3 and 4 (Yuan et al., NeurIPS 2022, arXiv 2206.01288, section 3.3). A group has the devices
of one stage, one for each pipeline; the path is the order of the stages. A bottleneck perfect matching makes
pairs between two groups so that the slowest pair is as fast as possible. Many matchings of one size are
solved in one call of numpy, since a call costs as much as a thousand numbers.

The path has free ends: an open travelling salesman problem. Exact up to EXACT groups (Held and Karp, 1962),
else the best of 2-opt and or-opt from the present order and some nearest-neighbour paths.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from hetpeer.stages.planning.device_clusters import chain

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

EXACT_SIZE = 9
"""Largest groups matched exactly in bulk, by all 2^R subsets. pipeline_rows.py searches larger ones."""

CACHED = 112
"""Matchings solved together: tables of more than these leave the processor's cache (and take four times as
long each)."""


def bottlenecks(costs: Floats) -> Floats:
    """The least possible maximum of a perfect matching, for each of B cost matrices.

    (R, R, B) → B, R ≤ EXACT_SIZE. The first r rows matched to the columns of a subset: best[subset] = min
    over its columns j of max(best[subset - j], cost[r, j]).
    """
    count = costs.shape[2]
    if count > CACHED:
        pieces = [costs[:, :, first : first + CACHED] for first in range(0, count, CACHED)]
        return np.concatenate([bottlenecks(np.ascontiguousarray(piece)) for piece in pieces])
    size = costs.shape[0]
    best = np.full((1, costs.shape[2]), -np.inf)
    for row in range(size):
        column, before, _ = _subsets(size, row + 1)
        best = np.maximum(best[before], costs[row][column]).min(axis=1)
    least: Floats = best[0]
    return least


def bounds(costs: Floats) -> Floats:
    """Lower bounds of `bottlenecks`, (R, R, B) → B: the largest of all devices' cheapest pairs."""
    least: Floats = np.maximum(costs.min(axis=0).max(axis=0), costs.min(axis=1).max(axis=0))
    return least


def matched(costs: Floats, most: float = np.inf) -> tuple[float, Ints]:
    """A bottleneck perfect matching of one (R, R) cost matrix of any size: (its maximum, column of each row).

    Binary search between `bounds` and the largest cost for the least threshold such that the costs up to it
    allow a perfect matching. `most`: the search ends there, since a matching no worse is known to exist.
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
    """Column of each row in a largest matching by `allowed`; -1: none."""
    pairs: Ints = maximum_bipartite_matching(csr_matrix(allowed), perm_type="column").astype(np.intp)
    return pairs


EXACT = 13
BEGINNINGS = 8
"""Nearest-neighbour paths tried for more groups than EXACT."""
MANY = 512
"""Largest product of groups and paths tried: more groups mean fewer paths."""
NOTICED = 1e-9
"""Improvements below this fraction of the longest hop are rounding errors."""


def shortest_path(distances: Floats, beginnings: int = BEGINNINGS) -> tuple[int, ...]:
    """The order of K groups with the shortest path; `distances` (K, K) is symmetric.

    For more than EXACT groups it is no longer than 0, 1, …, K - 1, from which and from `beginnings` paths it
    starts.
    """
    count = len(distances)
    if count < 3:
        return tuple(range(count))
    if count > EXACT:
        return _local(distances, beginnings)
    return tuple(int(place) for place in shortest_paths(distances[None])[0])


def length_of(distances: Floats, order: tuple[int, ...]) -> float:
    """Length of the path through the groups in `order`."""
    return float(sum(distances[a, b] for a, b in pairwise(order)))


def shortest_paths(distances: Floats) -> Ints:
    """The orders of K ≤ EXACT groups with the shortest paths, for each of B grids: (B, K, K) → (B, K).

    Held and Karp: best[subset, last] is the shortest path through a subset that ends at `last`; a size at a
    time.
    """
    grids, count = distances.shape[:2]
    flat = np.ascontiguousarray(distances.reshape(grids, -1).T)
    best = np.zeros((count, 1, grids))
    """Subsets of one group, which is the last: (subsets, place of the last in the subset, grid)."""
    choices: list[Ints] = []
    for size in range(2, count + 1):
        subsets, smaller, places = _subsets(count, size)
        # (subset, last, one before, grid): without the last, the length to the one before, and the hop
        lengths = best[smaller[:, :, None], np.arange(size - 1)]
        lengths += flat[subsets[:, :, None] * count + places]
        choices.append(lengths.argmin(axis=2))
        best = lengths.min(axis=2)
    last = best[0].argmin(axis=0)
    return np.array([_walk(count, choices, grid, int(end)) for grid, end in enumerate(last)], dtype=np.intp)


@cache
def _subsets(count: int, size: int) -> tuple[Ints, Ints, Ints]:
    """(subsets of `size` of `count`, place of each without each member, the remaining members)."""
    smaller = _places(count, size - 1)
    subsets = list(_places(count, size))
    left = [[tuple(c for c in subset if c != last) for last in subset] for subset in subsets]
    return (
        np.array(subsets, dtype=np.intp),
        np.array([[smaller[one] for one in row] for row in left], dtype=np.intp),
        np.array(left, dtype=np.intp),
    )


def _walk(count: int, choices: list[Ints], grid: int, last: int) -> tuple[int, ...]:
    """Follow the choices of a grid back from the end: the group before the last one of each subset."""
    subset, path = tuple(range(count)), []
    for size in range(count, 1, -1):
        place = _places(count, size)[subset]
        path.append(subset[last])
        subset, last = subset[:last] + subset[last + 1 :], int(choices[size - 2][place, last, grid])
    return (subset[0], *reversed(path))


@cache
def _places(count: int, size: int) -> dict[tuple[int, ...], int]:
    return {subset: place for place, subset in enumerate(combinations(range(count), size))}


def _local(distances: Floats, beginnings: int) -> tuple[int, ...]:
    """The best local optimum from several beginnings."""
    count = len(distances)
    number = min(beginnings, max(1, MANY // count))
    begun = [list(range(count))]
    if number:
        begun += [chain(distances, start).tolist() for start in range(0, count, -(-count // number))]
    paths = [_improved(distances, path) for path in begun]
    return min(paths, key=lambda path: length_of(distances, path))


def _improved(distances: Floats, path: list[int]) -> tuple[int, ...]:
    """Reverse pieces (2-opt) or move them, either way round (or-opt), while the path gets shorter."""
    order, least = np.array(path, dtype=np.intp), NOTICED * float(distances.max())
    while True:
        hop = _padded(distances, order)
        better = _turned(hop, order, least)
        if better is None:
            better = _moved(hop, order, least)
        if better is None:
            return tuple(int(one) for one in order)
        order = better


def _turned(hop: Floats, order: Ints, least: float) -> Ints | None:
    """The best reversal of a piece order[i..j]; hops at the ends of the path cost nothing."""
    i, j = _pieces(len(order))
    left, right = i, j + 2  # places in the padded order: i - 1 and j + 1
    gain = hop[left, i + 1] + hop[j + 1, right] - hop[left, j + 1] - hop[i + 1, right]
    best = int(gain.argmax())
    if gain[best] <= least:
        return None
    turned = order.copy()
    turned[i[best] : j[best] + 1] = order[i[best] : j[best] + 1][::-1]
    return turned


@cache
def _pieces(count: int) -> tuple[Ints, Ints]:
    """First and last place of each piece of two or more groups."""
    first, last = np.triu_indices(count, 1)
    return first, last


def _moved(hop: Floats, order: Ints, least: float) -> Ints | None:
    """The best move of a piece of one to three groups, either way round."""
    count = len(order)
    gap = np.arange(count + 1)  # between two places of the padded order, this one and the next
    there = hop[gap, gap + 1]
    best: tuple[float, Ints] | None = None
    for size in range(1, min(4, count)):
        first = np.arange(1, count - size + 2)[:, None]
        last = first + size - 1
        saved = there[first - 1] + there[last] - hop[first - 1, last + 1]
        beside = (gap >= first - 1) & (gap <= last)
        for head, tail in ((first, last), (last, first)):
            gains = saved + there - hop[gap, head] - hop[tail, gap + 1]
            gains[beside] = -np.inf
            row, to = (int(number) for number in np.unravel_index(int(gains.argmax()), gains.shape))
            if gains[row, to] > least and (best is None or gains[row, to] > best[0]):
                piece, rest = order[row : row + size], np.delete(order, np.s_[row : row + size])
                place = to if to < row else to - size
                turned = piece if head is first else piece[::-1]
                best = float(gains[row, to]), np.concatenate([rest[:place], turned, rest[place:]])
    return None if best is None else best[1]


def _padded(distances: Floats, order: Ints) -> NDArray[np.float64]:
    """Hops between places of the path, padded with a free place at both ends."""
    hop = np.zeros((len(order) + 2, len(order) + 2))
    hop[1:-1, 1:-1] = distances[np.ix_(order, order)]
    return hop
