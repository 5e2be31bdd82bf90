"""Orders that people use without a planner: devices in some order, laid into the grid, and nobody moved."""

from __future__ import annotations

import numpy as np

from hetpeer.stages.planning.grids.grid_costs import Prices, as_it_is


def natural(prices: Prices, stages: int, replicas: int) -> dict[str, float]:
    """Neighbours in one pipeline, or in one stage."""
    order = np.arange(stages * replicas)
    return {
        "by region": as_it_is(prices, order.reshape(replicas, stages)),
        "strided": as_it_is(prices, order.reshape(stages, replicas).T),
    }


def at_random(prices: Prices, stages: int, replicas: int, count: int, seed: int) -> list[float]:
    """Costs of so many random orders."""
    random = np.random.default_rng(seed)
    return [
        as_it_is(prices, random.permutation(stages * replicas).reshape(replicas, stages))
        for _ in range(count)
    ]
