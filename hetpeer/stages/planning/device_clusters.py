"""Orders of all devices that keep near ones together: nearest-neighbour chains, communities, halves. Pure.

The searches begin with such orders. Communities are Louvain's, halves come from divisive clustering. Pairs
are full matrices, and so is the arithmetic: networkx has Louvain too, but walks over half a million edges of
a thousand devices one by one, and on each device's nearest alone it finds worse communities
(benchmarks/networkx_parts.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

NOTICED = 1e-12
"""A move that adds less modularity than this does not count."""
NO_LESS = 1e-9
"""Least price of a pair, as a fraction of the farthest pair's."""
REDRAWN = 4
"""Number of times two halves are drawn anew, each time by mean distance."""


def chain(seconds: Floats, start: int) -> Ints:
    """All devices, each followed by the nearest that is left.

    `seconds` (N, N): price from each to each; infinite where they do not reach each other.
    """
    left = np.delete(np.arange(len(seconds)), start)
    order = [start]
    while len(left):
        nearest = int(seconds[order[-1], left].argmin())
        order.append(int(left[nearest]))
        left = np.delete(left, nearest)
    return np.array(order, dtype=np.intp)


# ── communities ────────────────────────────────────────────────────────────────────────────────────────────


def together(seconds: Floats, random: np.random.Generator) -> Floats:
    """Prices of pairs, plus a surcharge for each level of communities that separates them.

    A chain by these prices visits all of a community before it leaves it.
    """
    apart = _apart(seconds)
    most = apart.max()
    return sum((most * (own[:, None] != own) for own in communities(seconds, random)), apart)


def communities(seconds: Floats, random: np.random.Generator) -> list[Ints]:
    """The community of each device, level by level, small ones first: Louvain (Blondel et al., 2008).

    FusionLLM begins so, too. The weight of a pair is 1 / seconds.
    """
    levels: list[Ints] = []
    weights = 1.0 / (_apart(seconds) + np.diag(np.full(len(seconds), np.inf)))
    own = np.arange(len(weights))
    while len(weights) > 1:
        found = _moved(weights, random)
        count = int(found.max()) + 1
        if count == len(weights):
            break
        own = found[own]
        levels.append(own)
        order = np.argsort(found, kind="stable")
        first = np.searchsorted(found[order], np.arange(count))
        sums = np.add.reduceat(weights[np.ix_(order, order)], first, axis=0)
        weights = np.add.reduceat(sums, first, axis=1)
    return levels


def _moved(weights: Floats, random: np.random.Generator) -> Ints:
    """The community of each node after moving each one to where it adds most modularity, until nothing helps.

    Communities are numbered without holes.
    """
    degree = weights.sum(axis=1)
    total = degree.sum()
    found, held = np.arange(len(weights)), degree.copy()
    moving = True
    while moving:
        moving = False
        for node in random.permutation(len(weights)).tolist():
            here = found[node]
            held[here] -= degree[node]
            towards = np.bincount(found, weights[node], len(weights))
            towards[here] -= weights[node, node]
            gain = (towards - held * (degree[node] / total)) / total
            best = int(gain.argmax())
            if gain[best] > gain[here] + NOTICED:
                found[node], moving = best, True
            held[found[node]] += degree[node]
    return np.unique(found, return_inverse=True)[1]


# ── halves ─────────────────────────────────────────────────────────────────────────────────────────────────


def by_halves(seconds: Floats) -> Ints:
    """All devices, divided in two again and again, near ones together (divisive clustering, as HPS begins).

    In each half the devices nearest to the other half are next to it.
    """
    return _divided(_apart(seconds), np.arange(len(seconds)))


def _divided(apart: Floats, devices: Ints) -> Ints:
    """The devices in their order; `apart` is of these devices alone."""
    if len(devices) < 3:
        return devices
    outer = int(apart.sum(axis=1).argmax())
    leaning = apart[outer] - apart[apart[outer].argmax()]
    half = len(devices) // 2
    mean = np.repeat([1.0 / half, -1.0 / (len(devices) - half)], [half, len(devices) - half])
    for _ in range(REDRAWN):
        place = np.argsort(np.argsort(leaning, kind="stable"))
        leaning = (apart * mean[place]).sum(axis=1)
    order = np.argsort(leaning, kind="stable")
    halves = (order[:half], order[half:])
    return np.concatenate([_divided(apart[np.ix_(one, one)], devices[one]) for one in halves])


def _apart(seconds: Floats) -> Floats:
    """Prices of both ways together: symmetric, 0 to oneself, more than 0 to others.

    Devices that do not reach each other get twice the price of the farthest pair that does.
    """
    both = seconds + seconds.T
    np.fill_diagonal(both, 0.0)
    most = both[np.isfinite(both)].max(initial=0.0) or 1.0
    apart = np.clip(np.where(np.isfinite(both), both, 2 * most), NO_LESS * most, None)
    np.fill_diagonal(apart, 0.0)
    return apart
