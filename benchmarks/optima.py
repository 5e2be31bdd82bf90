"""Is the best grid found, where enumeration can tell? Small uneven networks, all partitions of each, and
the search for a second.

python -m benchmarks.optima
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.scenarios.networks import KINDS, TRAFFIC, uneven
from hetpeer.dht.base.runtime import dying_with_us
from hetpeer.stages.planning.grids.grid_costs import Prices
from hetpeer.stages.planning.grids.grid_search import search
from hetpeer.stages.planning.grids.population import GridPopulation

SHAPES = {(2, 4): 15, (4, 2): 15, (3, 4): 12, (4, 3): 12}
"""(stages, replicas) → how many networks."""
CPU_S = 1.0
PIECE = 1000
"""Partitions that are looked at together."""
SAME = 1 + 1e-9

Task = tuple[int, int, str, int]
"""Stages, replicas, kind and seed of a network."""


def partitions(devices: frozenset[int], size: int) -> Iterator[list[int]]:
    """All ways to divide `devices` into groups of `size`, one after the other."""
    if not devices:
        yield []
        return
    first = min(devices)
    for others in combinations(sorted(devices - {first}), size - 1):
        for rest in partitions(devices - {first, *others}, size):
            yield [first, *others, *rest]


def solve(task: Task) -> dict[str, Any]:
    stages, replicas, kind, seed = task
    prices = Prices(uneven(kind, seed, stages * replicas), TRAFFIC, replicas)
    began = time.process_time()
    found = search(prices, stages, replicas, 0, lambda: time.process_time() - began < CPU_S)
    every = np.array(list(partitions(frozenset(range(stages * replicas)), replicas)))
    best = min(
        float(GridPopulation(prices, piece.reshape(-1, stages, replicas)).costs.min())
        for piece in np.array_split(every, -(-len(every) // PIECE))
    )
    return {
        "shape": f"{stages}x{replicas}",
        "kind": kind,
        "seed": seed,
        "partitions": len(every),
        "optimum_s": best,
        "gap": found.best.total_s / best - 1,
    }


def measure(options: Any) -> dict[str, Any]:
    tasks: list[Task] = [
        (*shape, KINDS[number % len(KINDS)], options.seed + number)
        for shape, count in SHAPES.items()
        for number in range(count)
    ]
    rows = []
    with ProcessPoolExecutor(options.workers, initializer=dying_with_us()) as pool:
        for row in pool.map(solve, tasks):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    missed = [row for row in rows if row["gap"] > SAME - 1]
    return {"rows": rows, "instances": len(rows), "missed": len(missed), "met": not missed}


def show(figures: dict[str, Any]) -> None:
    worst = max(row["gap"] for row in figures["rows"])
    print(f"{figures['instances']} networks: {figures['missed']} optima missed, the worst by {worst:.1%}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    figures = measure(options)
    return report.finish("optima", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
