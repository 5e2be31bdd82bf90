"""Population annealing (Hukushima & Iba, 2003): many grids that cool down together; the worse half is given up again and again, and the others get its time.

Swaps of two devices are proposed and taken by their cost (Kirkpatrick et al., 1983). Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hetpeer.stages.planning.grids.bottleneck_matching import Ints
from hetpeer.stages.planning.grids.grid_costs import Prices
from hetpeer.stages.planning.grids.population import AT_ONCE, Population

PROPOSED = 256
"""Swaps of all grids in one step."""
REORDER = 40
"""Steps until the order of the groups is looked at again."""
COLD = 1e-4
"""The last temperature, as a part of the cost."""


class Annealed(NamedTuple):
    """The best grid that was seen."""

    cost: float
    """Seconds."""
    members: Ints
    """(K, R)"""
    evaluations: int
    """Swaps that were looked at."""


def anneal(
    prices: Prices,
    members: Ints,
    random: np.random.Generator,
    steps: int,
    hot: float,
    on: Callable[[], bool],
) -> Annealed:
    """What comes of the grids `members` (C, K, R) in so many steps, or while `on` is true. `hot`: the first temperature, as a part of the cost."""
    population = Population(prices, members, on)
    best, found = best_of(population)
    halvings, evaluations = len(members).bit_length(), 0
    for step in range(steps):
        if not on():
            break
        heat = population.costs * hot * (COLD / hot) ** (step / steps)
        batch = max(1, min(PROPOSED, AT_ONCE // population.replicas**2) // len(population))
        population.step(random, batch, heat)
        evaluations += batch * len(population)
        if step % REORDER == REORDER - 1:
            population.reorder(on)
        cost, groups = best_of(population)
        if cost < best:
            best, found = cost, groups
        if len(population) > 1 and step * halvings // steps < (step + 1) * halvings // steps:
            population.keep(np.argsort(population.costs)[: len(population) // 2])
    return Annealed(*best_of(Population(prices, found[None])), evaluations)


def best_of(population: Population) -> tuple[float, Ints]:
    """The cheapest of its grids: the cost, and its groups (K, R)."""
    costs = population.costs
    place = int(costs.argmin())
    return float(costs[place]), population.members[place].copy()
