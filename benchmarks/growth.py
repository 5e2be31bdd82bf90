"""How the search for a grid grows: 64 to 4,096 devices in 50 regions, eight stages, beside random orders
and a lower bound.

Of each size: processor seconds until there is a first answer, what it costs, and what is found in thirty, the
start of the program counted as `hetpeer plan` counts it. Ratios are of random orders (the mean of some,
nothing about them optimized) to ours; the gap is to the lower bound.

    python -m benchmarks.growth
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import fmean
from typing import Any

from benchmarks import report
from benchmarks.scenarios.networks import STAGES, TRAFFIC, regions
from benchmarks.scenarios.orders import at_random
from hetpeer.stages.planning.grids.grid_costs import Prices, lower_bound
from hetpeer.stages.planning.grids.grid_search import search

SIZES = (64, 256, 1000, 1024, 4096)
REGIONS = 50
CPU_S = 30.0
STOP_S = 28.0
"""The search is told to end: what it has begun takes a while."""
RANDOM = 20
MANY = 1000


def solve(devices: int, seed: int) -> dict[str, Any]:
    """One size, in this process."""
    replicas = devices // STAGES
    prices = Prices(regions(seed, devices, REGIONS), TRAFFIC, replicas)
    made_s = time.process_time()
    first = search(prices, STAGES, replicas, seed, lambda: False)
    again_s = time.process_time() - made_s  # is not counted twice
    found = search(prices, STAGES, replicas, seed, lambda: time.process_time() - again_s < STOP_S)
    cpu_s = time.process_time() - again_s
    first_s = made_s + again_s
    bound = lower_bound(prices, STAGES, replicas)
    return {
        "devices": devices,
        "first_cpu_s": first_s,
        "first_s": first.best.total_s,
        "cpu_s": cpu_s,
        "total_s": found.best.total_s,
        "evaluations": found.evaluations,
        "bound_s": bound,
        "gap": found.best.total_s / bound - 1,
        "random_over_ours": fmean(at_random(prices, STAGES, replicas, RANDOM, seed)) / found.best.total_s,
    }


def measure(options: Any) -> dict[str, Any]:
    rows = []
    for devices in SIZES:
        command = [
            sys.executable,
            "-m",
            "benchmarks.growth",
            "--one",
            str(devices),
            "--seed",
            str(options.seed),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout))
        print(rows[-1], file=sys.stderr, flush=True)
    many = next(row for row in rows if row["devices"] == MANY)
    return {
        "regions": REGIONS,
        "rows": rows,
        "goals": {"a thousand devices in 30 CPU s": many["cpu_s"] <= CPU_S},
        "met": many["cpu_s"] <= CPU_S,
    }


def show(figures: dict[str, Any]) -> None:
    for row in figures["rows"]:
        print(
            f"{row['devices']:5} devices: {row['first_s']:.2f} s a step after {row['first_cpu_s']:.1f} CPU "
            f"s, {row['total_s']:.2f}"
            f" after {row['cpu_s']:.1f} ({row['evaluations']} swaps); {row['gap']:.0%} above the bound; "
            "random orders take"
            f" {row['random_over_ours']:.2f} times as long"
        )
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--one", type=int, help="this many devices, in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(solve(options.one, options.seed)))
        return 0
    figures = measure(options)
    return report.finish("growth", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
