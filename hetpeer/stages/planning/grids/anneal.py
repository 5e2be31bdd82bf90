"""Population annealing (Hukushima & Iba, 2003): many grids cool down together; the worse half is dropped
repeatedly.

Swaps of two devices are proposed and accepted by their cost (Kirkpatrick et al., 1983). Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hetpeer.stages.planning.grids.bottleneck_matching import Ints
from hetpeer.stages.planning.grids.grid_costs import Prices
from hetpeer.stages.planning.grids.population import AT_ONCE, GridPopulation

PROPOSED = 256
"""Swaps of all grids in one step."""
REORDER = 40
"""Steps between new orders of the groups."""
COLD = 1e-4
"""Last temperature, as a fraction of the cost."""


class Annealed(NamedTuple):
    """The best grid seen."""

    cost: float
    """Seconds of a step."""
    members: Ints
    """(K, R)."""
    evaluations: int
    """Swaps that were evaluated."""


def anneal(
    prices: Prices,
    members: Ints,
    random: np.random.Generator,
    steps: int,
    hot: float,
    on: Callable[[], bool],
) -> Annealed:
    """The best grid from `members` (C, K, R) in `steps` steps, or while `on` is true.

    `hot`: the first temperature, as a fraction of the cost.
    """
    population = GridPopulation(prices, members, on)
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
    return Annealed(*best_of(GridPopulation(prices, found[None])), evaluations)


def best_of(population: GridPopulation) -> tuple[float, Ints]:
    """(cost, groups (K, R)) of its cheapest grid."""
    costs = population.costs
    place = int(costs.argmin())
    return float(costs[place]), population.members[place].copy()
