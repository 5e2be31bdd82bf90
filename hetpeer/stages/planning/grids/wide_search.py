"""The search for a grid with many pipelines: annealing of one grid (pipeline_rows.py). Pure except for `on`.

The cheapest of the beginnings is matched exactly, its stages put into their best order (Eq. 4), and cooled
down in rounds, each twice as long as the last, all from the best grid so far. After each round the order is
optimized again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hetpeer.stages.planning.grids import group_path
from hetpeer.stages.planning.grids.bottleneck_matching import Ints
from hetpeer.stages.planning.grids.grid_costs import GridCost, Prices, as_it_is, cost_of
from hetpeer.stages.planning.grids.pipeline_rows import PipelineRows

PROPOSED = 512
"""Swaps in one step."""
STEPS = 1000
"""Steps of the first round."""
REMATCH = 250
"""Steps between exact matchings."""
HOT = (0.002, 0.0005)
"""First temperatures, round by round, as fractions of the cost."""
COLD = 1e-5
"""Last temperature, as a fraction of the cost."""


def widely(
    prices: Prices,
    grids: Ints,
    random: np.random.Generator,
    on: Callable[[], bool],
    bound: float,
) -> tuple[GridCost, int]:
    """(best grid from the beginnings `grids` (C, K, R) while `on` is true, number of swaps evaluated)."""
    begun = cost_of(prices, min(grids, key=lambda grid: as_it_is(prices, grid.T)))
    rows = PipelineRows(prices, np.array(begun.grid))
    best, cost, evaluations, round_ = rows.grid.copy(), rows.cost, 0, 0
    while on() and cost > bound:
        steps, hot = STEPS << round_ // len(HOT), HOT[round_ % len(HOT)]
        rows.put(best)
        for step in range(steps):
            if not on():
                break
            rows.step(random, PROPOSED, cost * hot * (COLD / hot) ** (step / steps))
            evaluations += PROPOSED
            if step % REMATCH == REMATCH - 1:
                rows.rematch()
            if rows.cost < cost:
                best, cost = rows.grid.copy(), rows.cost
        if rows.stages > group_path.EXACT and not on():
            break  # ordering so many takes long
        ordered = cost_of(prices, best.T)
        if ordered.total_s < cost:
            best, cost = np.array(ordered.grid), ordered.total_s
        round_ += 1
    rows.put(best)
    rows.rematch()
    return rows.found, evaluations
