"""Many simulated histories of the protocol under churn: does any break an invariant, or hang?

Each seed is another swarm (stages, cuts, volunteers, slots, latencies, time-outs) with its own faults (peer/simulate/). A history that breaks an
invariant is named by its seed: `python -m hetpeer.peer.simulate.run --seed N --faults 20` replays it.

    make proof-churn
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks import report
from hetpeer.dht.processes import dying_with_us
from hetpeer.peer.simulate.coverage import Cell, Coverage
from hetpeer.peer.simulate.run import Outcome, simulate

CHUNK = 100


@dataclass(slots=True)
class Tally:
    """What some histories came to."""

    histories: int = 0
    faults: int = 0
    events: int = 0
    virtual_s: float = 0.0
    broken: list[Outcome] = field(default_factory=list)
    coordinator: Counter[Cell] = field(default_factory=Counter)
    member: Counter[Cell] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.histories += other.histories
        self.faults += other.faults
        self.events += other.events
        self.virtual_s += other.virtual_s
        self.broken += other.broken
        self.coordinator.update(other.coordinator)
        self.member.update(other.member)


def some(first: int, count: int, faults: int) -> Tally:
    """The histories of seeds from `first` on."""
    coverage, tally = Coverage(), Tally()
    for seed in range(first, first + count):
        outcome = simulate(seed, coverage, faults=faults)
        one = Tally(1, outcome.faults, outcome.events, outcome.virtual_s)
        one.broken = [outcome] if outcome.violation else []
        tally.add(one)
    tally.coordinator, tally.member = coverage.coordinator, coverage.member
    return tally


def measure(options: Any) -> dict[str, Any]:
    began, tally = time.monotonic(), Tally()
    firsts = range(options.seed, options.seed + options.count, CHUNK)
    with ProcessPoolExecutor(options.jobs, initializer=dying_with_us()) as pool:
        chunks = [
            pool.submit(some, first, min(CHUNK, options.seed + options.count - first), options.faults)
            for first in firsts
        ]
        for chunk in chunks:
            found = chunk.result()
            for outcome in found.broken:
                print(outcome, file=sys.stderr, flush=True)
            tally.add(found)
    seconds = time.monotonic() - began
    return {
        "histories": tally.histories,
        "faults": tally.faults,
        "events": tally.events,
        "virtual_hours": round(tally.virtual_s / 3600, 1),
        "seconds": round(seconds, 1),
        "histories_a_second": round(tally.histories / seconds, 1),
        "violations": [{"seed": one.seed, "why": one.violation} for one in tally.broken],
        "rarest_cells": _rarest(tally.coordinator) | _rarest(tally.member),
        "met": not tally.broken,
    }


def _rarest(cells: Counter[Cell]) -> dict[str, int]:
    return {" ".join(cell): times for cell, times in cells.most_common()[:-6:-1]}


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--count", type=int, default=100_000, help="histories (default: 100000)")
    parser.add_argument("--faults", type=int, default=20, help="of each (default: 20)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    figures = measure(options)
    document = report.keep("histories", figures, seed=options.seed)
    if options.json:
        print(json.dumps(document))
    else:
        print(
            f"{figures['histories']} histories with {figures['faults']} faults, {figures['virtual_hours']} virtual hours,"
            f" in {figures['seconds']} s: {len(figures['violations'])} violations"
        )
        for one in figures["violations"]:
            print(f"  seed {one['seed']}: {one['why']}")
        print(f"  rarest cells reached: {figures['rarest_cells']}")
    return 0 if figures["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
