"""Seeded bugs: within how many simulated histories is each of them caught three times
(tests/simulation/mutants.py)?

Histories are those of `make proof-churn`, from seed 0 on, with 20 faults each; a few bugs have histories of
their own (tests/simulation/mutant_histories.py). A bug that fewer than three of the first 1,500 catch is
named.

    python -m benchmarks.mutants
"""

from __future__ import annotations

import gc
import inspect
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from benchmarks import report
from hetpeer.dht.base.runtime import dying_with_us
from tests.simulation.mutant_histories import mutant_history
from tests.simulation.mutants import MUTANTS

TIMES = 3


def hunted(name: str, most: int, faults: int) -> dict[str, Any]:
    """Seeds of the first histories that catch the bug `name`, and how many histories that took."""
    caught: list[int] = []
    seed = -1
    while len(caught) < TIMES and seed + 1 < most:
        seed += 1
        with MUTANTS[name]():
            outcome = mutant_history(name, seed, faults)
        gc.collect()
        if outcome.caught:
            caught.append(seed)
    return {"bug": inspect.getdoc(MUTANTS[name]), "caught_by": caught, "histories": seed + 1}


def measure(options: Any) -> dict[str, Any]:
    with ProcessPoolExecutor(options.jobs, initializer=dying_with_us()) as pool:
        one = partial(hunted, most=options.most, faults=options.faults)
        found = dict(zip(MUTANTS, pool.map(one, MUTANTS), strict=True))
    found = dict(sorted(found.items(), key=lambda item: item[1]["histories"]))
    return {
        "faults": options.faults,
        "mutants": found,
        "caught": sum(len(one["caught_by"]) == TIMES for one in found.values()),
        "met": all(len(one["caught_by"]) == TIMES for one in found.values()),
    }


def show(figures: dict[str, Any]) -> None:
    for name, one in figures["mutants"].items():
        seeds = ", ".join(map(str, one["caught_by"])) or "none"
        print(f"{name:20} caught by {seeds}, of {one['histories']}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--most", type=int, default=1500, help="histories for each (default: 1500)")
    parser.add_argument("--faults", type=int, default=20, help="of each history (default: 20)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    return report.finish("mutants", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
