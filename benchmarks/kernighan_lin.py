"""The search for a grid beside restarts of Kernighan-Lin, on 100 generated networks of five kinds.

Both have equal processor seconds in one process, one after the other, imports not counted. Kernighan-Lin
is DT-FM's (`benchmarks.baselines.dtfm`) in both variants, each with all of the time: a genetic search in
which every child descends, as long as time is left. Ratios are ours to the better of the two, of seconds a
step.

    python -m benchmarks.kernighan_lin
"""

from __future__ import annotations

import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

from benchmarks import report
from benchmarks.baselines.dtfm import PARENTS, DtFm, Moves
from benchmarks.scenarios.networks import FIVE_KINDS, REPLICAS, STAGES, TRAFFIC, uneven
from hetpeer.dht.base.runtime import dying_with_us
from hetpeer.stages.planning.grids.grid_costs import Prices
from hetpeer.stages.planning.grids.grid_search import search

CPU_S = 10.0
SAME = 1e-9
VARIANTS = (Moves.KERNIGHAN_LIN, Moves.KERNIGHAN_LIN_CODE)


def solve(task: tuple[str, int, float]) -> tuple[str, int, dict[str, float]]:
    """(kind, seed, way → seconds a step) of one network."""
    kind, seed, cpu_s = task
    prices = Prices(uneven(kind, seed), TRAFFIC, REPLICAS)
    began = time.process_time()
    ours = search(prices, STAGES, REPLICAS, 0, lambda: time.process_time() - began < cpu_s)
    found = {"hetpeer": ours.best.total_s}
    for moves in VARIANTS:
        began = time.process_time()
        theirs = DtFm(prices, STAGES, REPLICAS, seed, moves)
        found[moves.value] = theirs.run(PARENTS, on=lambda: time.process_time() - began < cpu_s)  # noqa: B023 - ends in this turn
    return kind, seed, found


def measure(options: Any) -> dict[str, Any]:
    found: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in FIVE_KINDS}
    tasks = [(kind, seed, options.cpu_s) for seed, kind in product(range(options.networks), FIVE_KINDS)]
    with ProcessPoolExecutor(options.workers, initializer=dying_with_us()) as pool:
        for kind, seed, one in pool.map(solve, tasks):
            found[kind][str(seed)] = one
            print(kind, seed, {way: round(s, 3) for way, s in one.items()}, file=sys.stderr, flush=True)
    ratios = {
        kind: [one["hetpeer"] / min(one[moves.value] for moves in VARIANTS) for one in seeds.values()]
        for kind, seeds in found.items()
    }
    worst = max(max(one) for one in ratios.values())
    goals = {"never worse than Kernighan-Lin": worst <= 1 + SAME}
    return {
        "cpu_s": options.cpu_s,
        "found": found,
        "ratios": ratios,
        "goals": goals,
        "met": all(goals.values()),
    }


def show(figures: dict[str, Any]) -> None:
    for kind, ratios in figures["ratios"].items():
        print(
            f"{kind:12} middle {statistics.median(ratios):.3f}, best {min(ratios):.3f}, worst "
            f"{max(ratios):.3f} of the better Kernighan-Lin's ({len(ratios)} networks, "
            f"{figures['cpu_s']:g} CPU s each)"
        )
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--networks", type=int, default=20, help="of each kind (default: 20)")
    parser.add_argument("--cpu-s", type=float, default=CPU_S, help=f"of each search (default: {CPU_S:g})")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    figures = measure(options)
    return report.finish("kernighan-lin", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
