"""Where the search of a grid begins: devices that are near each other next to each other, along a chain through all of them. Pure."""

from __future__ import annotations

import numpy as np

from hetpeer.stages.planning.grids.costs import Prices
from hetpeer.stages.planning.grids.matching import Floats, Ints

STARTS = 4
"""Chains begin at so many devices."""


def beginnings(prices: Prices, stages: int, replicas: int, random: np.random.Generator) -> Ints:
    """(C, K, R): chains by either price, and one at random, folded in all ways."""
    starts = random.permutation(stages * replicas)[:STARTS]
    orders = [chain(price, int(start)) for price in (prices.passing, prices.reducing) for start in starts]
    orders.append(random.permutation(stages * replicas))
    widths = [width for width in range(stages, 0, -1) if stages % width == 0]
    return np.stack([folded(order, stages, replicas, width) for order in orders for width in widths])


def chain(prices: Floats, start: int) -> Ints:
    """All devices, each followed by the nearest that is left."""
    left = np.ones(len(prices), dtype=np.bool_)
    order = [start]
    for _ in range(len(prices) - 1):
        left[order[-1]] = False
        order.append(int(np.where(left, prices[order[-1]], np.inf).argmin()))
    return np.array(order, dtype=np.intp)


def folded(order: Ints, stages: int, replicas: int, width: int) -> Ints:
    """A chain laid into the grid in strips of `width` stages, pipeline after pipeline, so that neighbours in the chain are in one pipeline. Width 1
    makes them a stage. `width` divides `stages`. Returns (K, R).
    """
    strips = order.reshape(stages // width, replicas, width)
    return np.ascontiguousarray(strips.transpose(0, 2, 1).reshape(stages, replicas))
