"""Many simulated histories of the protocol under churn: does any break an invariant, or hang?

Each seed is another swarm (stages, cuts, volunteers, slots, latencies, time-outs) with its own faults
(peer/simulate/). A history that breaks an invariant is named by its seed: `python -m
tests.simulation.histories --seed N --faults 20` replays it, `tests.simulation.overlap_histories` one of
`--kind overlapping`, and with `--by-stage` one of `--kind by-stage`. What is done is noted chunk by chunk in
`--journal`: interrupted, the same command goes on where it was, also at another commit, as long as no module
that a history loads differs.

    make proof-churn
    make proof-async    # two thousand in which steps overlap, every other one of clusters that average, and
                        # two thousand in which later stages are less stale

Where a hundred thousand take too long at a time, `--seed 50000 --count 50000` does the second half, with a
result file of its own.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from benchmarks import report
from benchmarks.journal import Journal, sources
from hetpeer.averaging.member.member_life import Phase
from hetpeer.bootstrap.state.effects import CoordinatorState
from hetpeer.dht.base.runtime import dying_with_us
from tests.simulation import overlap_histories
from tests.simulation.cells import IMPOSSIBLE_COORDINATOR, IMPOSSIBLE_MEMBER
from tests.simulation.coverage import COORDINATOR_EVENTS, MEMBER_MESSAGES, Coverage
from tests.simulation.histories import HistoryOutcome, simulate


class Plays(Protocol):
    """One history by its seed, with this many faults."""

    def __call__(self, seed: int, coverage: Coverage, *, faults: int) -> HistoryOutcome: ...


KINDS: Mapping[str, Plays] = {
    "mixed": simulate,
    "overlapping": overlap_histories.simulate,
    "by-stage": partial(overlap_histories.simulate, by_stage=True),
}
"""Which steps overlap: those of some shapes, all, all with later stages less stale."""
CHUNK = 100
OFTEN = 30
"""How often each cell of the state machines ought to be reached."""


@dataclass(slots=True)
class Tally:
    """Results of some histories."""

    histories: int = 0
    faults: int = 0
    events: int = 0
    virtual_s: float = 0.0
    busy_s: float = 0.0
    """Processor seconds."""
    broken: dict[str, str] = field(default_factory=dict)
    """Seed → the invariant and how."""
    overlapped: int = 0
    """Committed steps that had begun before the one that they follow was committed."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Kind of record → how many histories have it in their log. Only clusters are founded and dissolved."""
    cells: Counter[str] = field(default_factory=Counter)
    """"coordinator|member state event" → how often it was reached, without clusters."""

    def add(self, other: Tally) -> None:
        self.histories += other.histories
        self.faults += other.faults
        self.events += other.events
        self.virtual_s += other.virtual_s
        self.busy_s += other.busy_s
        self.broken |= other.broken
        self.overlapped += other.overlapped
        self.kinds.update(other.kinds)
        self.cells.update(other.cells)


def some(first: int, count: int, faults: int, kind: str) -> Tally:
    """The histories of this kind with seeds from `first` on."""
    play = KINDS[kind]
    coverage, tally, began = Coverage(), Tally(), time.process_time()
    gc.freeze()
    gc.disable()  # a history is small: what it leaves is collected when it is over
    for seed in range(first, first + count):
        gc.collect()
        outcome = play(seed, coverage, faults=faults)
        one = Tally(1, outcome.faults, outcome.events, outcome.virtual_s)
        one.overlapped, one.kinds = outcome.overlapped, Counter(outcome.kinds)
        one.broken = {str(seed): outcome.violation} if outcome.violation else {}
        tally.add(one)
    for core, cells in (("coordinator", coverage.coordinator), ("member", coverage.member)):
        tally.cells.update({" ".join((core, *cell)): times for cell, times in cells.items()})
    tally.busy_s = time.process_time() - began
    return tally


def possible() -> list[str]:
    """Cells of both machines, but those that no history can reach, each with its reason
    (tests/simulation/cells.py).
    """
    coordinator = set(product((state.value for state in CoordinatorState), COORDINATOR_EVENTS))
    member = set(product((phase.value for phase in Phase), MEMBER_MESSAGES))
    told = {(state.value, "paced") for state in CoordinatorState}  # said by the daemon alone
    return sorted(
        [" ".join(("coordinator", *cell)) for cell in coordinator - IMPOSSIBLE_COORDINATOR.keys() - told]
        + [" ".join(("member", *cell)) for cell in member - IMPOSSIBLE_MEMBER.keys()]
    )


def measure(options: Any) -> dict[str, Any]:
    for seed in (0, 1):
        overlap_histories.simulate(seed, Coverage(), faults=1)  # loads all modules that a history needs
    journal = Journal(
        options.journal,
        sources=sources("tests.simulation"),
        faults=options.faults,
        kind=options.kind,
    )
    firsts = range(options.seed, options.seed + options.count, CHUNK)
    with ProcessPoolExecutor(options.jobs, initializer=dying_with_us()) as pool:
        chunks = {
            pool.submit(some, first, CHUNK, options.faults, options.kind): first
            for first in firsts
            if str(first) not in journal.done
        }
        for chunk in as_completed(chunks):
            found = chunk.result()
            figures = {one.name: getattr(found, one.name) for one in fields(found)}
            journal.add(str(chunks[chunk]), figures)
            for seed, why in found.broken.items():
                print(f"seed {seed}: {why}", file=sys.stderr, flush=True)
    tally = Tally()
    for first in firsts:
        figures = journal.done[str(first)]
        counters = {name: Counter(figures[name]) for name in ("cells", "kinds")}
        tally.add(Tally(**(figures | counters)))
    return {
        "commits": sorted(journal.commits),
        "histories": tally.histories,
        "faults": tally.faults,
        "events": tally.events,
        "virtual_hours": round(tally.virtual_s / 3600, 1),
        "processor_hours": round(tally.busy_s / 3600, 2),
        "histories_a_second_and_core": round(tally.histories / tally.busy_s, 1),
        "violations": [{"seed": int(seed), "why": why} for seed, why in tally.broken.items()],
        "overlapped_steps": tally.overlapped,
        "histories_with": dict(sorted(tally.kinds.items())),
        "cells_reached": len(tally.cells),
        "rare_cells": {cell: tally.cells[cell] for cell in possible() if tally.cells[cell] < OFTEN},
        "met": not tally.broken,
    }


def show(figures: dict[str, Any]) -> None:
    print(
        f"{figures['histories']} histories with {figures['faults']} faults, {figures['virtual_hours']} "
        "virtual hours,"
        f" in {figures['processor_hours']} processor hours: {len(figures['violations'])} violations"
    )
    with_kinds = ", ".join(f"{kind} in {count}" for kind, count in figures["histories_with"].items())
    print(f"  steps that overlapped: {figures['overlapped_steps']}; in the logs: {with_kinds}")
    for one in figures["violations"]:
        print(f"  seed {one['seed']}: {one['why']}")
    print(f"  cells reached fewer than {OFTEN} times: {figures['rare_cells']}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument(
        "--count", type=int, default=100_000, help=f"histories, a multiple of {CHUNK} (default: 100000)"
    )
    parser.add_argument("--faults", type=int, default=20, help="of each (default: 20)")
    parser.add_argument(
        "--journal",
        type=Path,
        default=Path("histories.journal"),
        help="where to note what is done (default: ./histories.journal)",
    )
    parser.add_argument("--kind", choices=list(KINDS), default="mixed", help="which steps overlap")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    figures = measure(options)
    name = "histories" if options.kind == "mixed" else f"histories-{options.kind}"
    name = f"{name}-{options.seed}" if options.seed else name
    return report.finish(name, figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
