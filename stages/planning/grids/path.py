"""The shortest way through all groups, in any order and with any ends: DT-FM, Eq. 4 (arXiv 2206.01288, 3.3), an open travelling salesman.

Exact up to EXACT groups (Held and Karp, 1962), else the best of 2-opt and or-opt from some nearest-neighbour paths. Pure.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from hetpeer.stages.planning.grids.matching import Floats, Ints

EXACT = 13
BEGINNINGS = 8


def shortest_path(distances: Floats) -> tuple[int, ...]:
    """The order of K groups that `distances` (K, K), symmetric, makes shortest."""
    count = len(distances)
    if count < 3:
        return tuple(range(count))
    return _exact(distances) if count <= EXACT else _local(distances)


def length_of(distances: Floats, order: tuple[int, ...]) -> float:
    """The sum of the hops."""
    return float(sum(distances[a, b] for a, b in pairwise(order)))


def _exact(distances: Floats) -> tuple[int, ...]:
    """best[subset, last]: the shortest path through a subset that ends at `last`; all subsets of a size at once."""
    count = len(distances)
    best = np.zeros((count, 1))
    """Subsets of one group, last is itself: (subsets, place of the last in the subset)."""
    choices: list[Ints] = []
    for size in range(2, count + 1):
        subsets, smaller, places = _step(count, size)
        # (subset, last, one before): without the last, how far to the one before, and the hop
        before = best[smaller[:, :, None], np.arange(size - 1)[None, None, :]]
        hop = distances[subsets[:, :, None], places]
        lengths = before + hop
        choices.append(lengths.argmin(axis=2))
        best = np.take_along_axis(lengths, choices[-1][:, :, None], axis=2)[:, :, 0]
    last = int(best[0].argmin())
    return _walk(count, choices, last)


@cache
def _step(count: int, size: int) -> tuple[Ints, Ints, Ints]:
    """Subsets of `size` groups; the place of each without each of its members among the smaller ones; and what is left then."""
    smaller = {subset: place for place, subset in enumerate(combinations(range(count), size - 1))}
    subsets = list(combinations(range(count), size))
    left = [[tuple(c for c in subset if c != last) for last in subset] for subset in subsets]
    return (
        np.array(subsets, dtype=np.intp),
        np.array([[smaller[one] for one in row] for row in left], dtype=np.intp),
        np.array(left, dtype=np.intp),
    )


def _walk(count: int, choices: list[Ints], last: int) -> tuple[int, ...]:
    """Back from the end: which group was before the last one of each subset."""
    subset, path = tuple(range(count)), []
    for size in range(count, 1, -1):
        place = _places(count, size)[subset]
        path.append(subset[last])
        subset, last = subset[:last] + subset[last + 1 :], int(choices[size - 2][place, last])
    return (subset[0], *reversed(path))


@cache
def _places(count: int, size: int) -> dict[tuple[int, ...], int]:
    return {subset: place for place, subset in enumerate(combinations(range(count), size))}


def _local(distances: Floats) -> tuple[int, ...]:
    """From nearest-neighbour paths with BEGINNINGS beginnings, pieces are turned and moved until nothing helps."""
    count = len(distances)
    starts = range(0, count, -(-count // BEGINNINGS))
    paths = (_improved(distances, _nearest(distances, start)) for start in starts)
    return min(paths, key=lambda path: length_of(distances, path))


def _nearest(distances: Floats, start: int) -> list[int]:
    left = np.ones(len(distances), dtype=np.bool_)
    path = [start]
    for _ in range(len(distances) - 1):
        left[path[-1]] = False
        path.append(int(np.where(left, distances[path[-1]], np.inf).argmin()))
    return path


def _improved(distances: Floats, path: list[int]) -> tuple[int, ...]:
    """Any piece turned round (2-opt), or moved elsewhere either way round (or-opt), as long as that is shorter."""
    order = np.array(path, dtype=np.intp)
    while True:
        better = _turned(distances, order)
        if better is None:
            better = _moved(distances, order)
        if better is None:
            return tuple(int(one) for one in order)
        order = better


def _turned(distances: Floats, order: Ints) -> Ints | None:
    """The best turn of a piece order[i..j]; hops at the ends of the path cost nothing."""
    hop = _padded(distances, order)
    count = len(order)
    i, j = np.triu_indices(count, 1)
    left, right = i, j + 2  # places in the padded order: i - 1 and j + 1
    gain = hop[left, i + 1] + hop[j + 1, right] - hop[left, j + 1] - hop[i + 1, right]
    best = int(gain.argmax())
    if gain[best] <= 1e-12:
        return None
    turned = order.copy()
    turned[i[best] : j[best] + 1] = order[i[best] : j[best] + 1][::-1]
    return turned


def _moved(distances: Floats, order: Ints) -> Ints | None:
    """The best move of a piece of one to three groups elsewhere, either way round."""
    count = len(order)
    best: tuple[float, Ints] | None = None
    hole = _padded(distances, order)
    for size in range(1, min(4, count)):
        for begin in range(count - size + 1):
            piece, rest = order[begin : begin + size], np.delete(order, np.s_[begin : begin + size])
            hop = _padded(distances, rest)[np.arange(len(rest) + 1), np.arange(1, len(rest) + 2)]
            ends = np.zeros((2, len(rest) + 2))
            ends[:, 1:-1] = distances[np.ix_([piece[0], piece[-1]], rest)]
            gain = hole[begin, begin + 1] + hole[begin + size, begin + size + 1] - hop[begin]
            for one, (first, last) in ((piece, ends), (piece[::-1], ends[::-1])):
                gains = gain + hop - first[:-1] - last[1:]
                place = int(gains.argmax())
                if gains[place] > 1e-12 and (best is None or gains[place] > best[0]):
                    best = float(gains[place]), np.concatenate([rest[:place], one, rest[place:]])
    return None if best is None else best[1]


def _padded(distances: Floats, order: Ints) -> NDArray[np.float64]:
    """Hops between places of the path, with a place in front and one behind that are next to everybody."""
    hop = np.zeros((len(order) + 2, len(order) + 2))
    hop[1:-1, 1:-1] = distances[np.ix_(order, order)]
    return hop
