"""Beginnings of the grid search: chains that keep near devices together (device_clusters.py), folded into
grids. Pure.
"""

from __future__ import annotations

import numpy as np

from hetpeer.stages.planning.device_clusters import by_halves, chain, together
from hetpeer.stages.planning.grids.bottleneck_matching import Ints
from hetpeer.stages.planning.grids.grid_costs import Prices

STARTS = 4
"""Devices at which chains begin."""


def beginnings(prices: Prices, stages: int, replicas: int, random: np.random.Generator) -> Ints:
    """Beginnings (C, K, R): nearest-neighbour, community and halving chains by both prices, and a random one.

    Each is folded in all possible widths.
    """
    starts = random.permutation(stages * replicas)[:STARTS].tolist()
    orders = []
    for price in (prices.passing, prices.reducing):
        orders += [chain(one, start) for one in (price, together(price, random)) for start in starts]
        orders.append(by_halves(price))
    orders.append(random.permutation(stages * replicas))
    widths = [width for width in range(stages, 0, -1) if stages % width == 0]
    return np.stack([folded(order, stages, replicas, width) for order in orders for width in widths])


def folded(order: Ints, stages: int, replicas: int, width: int) -> Ints:
    """A chain laid into the grid in strips of `width` stages, pipeline after pipeline; returns (K, R).

    Neighbours in the chain are in one pipeline; with width 1 they form a stage. `width` divides `stages`.
    """
    strips = order.reshape(stages // width, replicas, width)
    return np.ascontiguousarray(strips.transpose(0, 2, 1).reshape(stages, replicas))
