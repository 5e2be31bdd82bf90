"""Clusters that never stop for an averaging: how much their steps overlap, and how busy their stages are.

Virtual time, with the very coordinator and volunteers (tests/simulation): four clusters of two stages, a
step takes about 1.4 s, a message 20 ms. Steps overlap by one, and clusters average, with delay, after every
batch or every other one. Beside it are the same clusters that come to rest for each averaging, and one
cluster alone. Times to a loss are in benchmarks/speedup.py.

    python -m benchmarks.no_pause
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from benchmarks import report
from benchmarks.swarm import NEVER
from hetpeer.bootstrap.grouped.mean_order import MeanOrder
from hetpeer.bootstrap.run.settings import AveragingSettings
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.checked_volunteer import CheckedVolunteer, CheckedWorker
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import BLOCKS, updates_behind
from tests.simulation.sim_grouped import GroupedSwarm

STAGES, MICROBATCHES = 2, 4
LATENCY_S = (0.02, 0.02)
LIMIT_S = 20_000.0
INTERVALS = (1, 2)
CLUSTERS = 4
OVERLAP, BUSY = 0.9, 0.9
"""Goals: updates by which a step is behind, in the mean; the least busy stage's share of the time."""
PARTS_S = (0.0, 0.5, 1.0, 2.0)
"""Most seconds by which a part of an averaging leaves late, as on a slow line."""
LAST = 2
"""Batches of each cluster at the end, and at the beginning, in which nothing is measured."""


@dataclass(eq=False)
class TimedWorker(CheckedWorker):
    """A worker that notes when it is busy."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    """Beginning and end of everything that it was given, in virtual seconds."""

    def submit(self, seconds: float, finish: Any) -> None:
        begins = max(self._busy_until, self._world.now)
        super().submit(seconds, finish)
        self.spans.append((begins, self._busy_until))


class TimedVolunteer(CheckedVolunteer):
    """A volunteer with such a worker."""

    worker_class = TimedWorker
    worker: TimedWorker


class TimedSwarm(GroupedSwarm):
    """A grouped run of such volunteers."""

    volunteer_class = TimedVolunteer


def measured(
    seed: int, clusters: int, interval: int, batches: int, part_s: float = 0.0, *, rests: bool = False
) -> dict[str, float]:
    """One run; `rests`: clusters come to rest for every averaging."""
    cut = BLOCKS // STAGES
    config = HistoryConfig(
        volunteers=STAGES * clusters,
        layouts=(tuple((stage * cut, (stage + 1) * cut) for stage in range(STAGES)),),
        steps=batches * clusters,
        microbatches=MICROBATCHES,
        evaluation_microbatches=0,
        evaluate_every=NEVER,
        slot_capacity=MICROBATCHES,
        checkpoint_every=NEVER,
        staleness=1,
        latency_s=LATENCY_S,
        part_s=(0.0, part_s),
        speeds=(1.0,),
        duplicates=0.0,
    )
    span = AveragingSettings().span
    swarm = TimedSwarm(
        seed, config, CheckedSymbols(BLOCKS), Coverage(), span=span, interval=interval, delayed=True
    )
    at: list[float] = []
    swarm.hooks.append(lambda what: at.append(swarm.world.now) if what == "record commit" else None)
    with patch.object(MeanOrder, "overlaps", lambda *_: False) if rests else nullcontext():
        swarm.run(LIMIT_S)
    first, last = LAST * clusters, len(at) - 1 - LAST * clusters
    begin, end = at[first], at[last]
    shares = []
    for volunteer in swarm.volunteers.values():
        assert isinstance(volunteer, TimedVolunteer)
        spans = ((max(here, begin), min(there, end)) for here, there in volunteer.worker.spans)
        shares.append(sum(max(there - here, 0.0) for here, there in spans) / (end - begin))
    averages = [record for record in swarm.log if record["kind"] == "average"]
    return {
        "overlap": statistics.fmean(updates_behind(swarm.log)[first:last]),
        "busy": statistics.fmean(shares),
        "least_busy": min(shares),
        "batches_per_s": (last - first) / (end - begin),
        "averages": len(averages),
        "averaging_s": statistics.fmean(r["seconds"] for r in averages) if averages else 0.0,
        "members": statistics.fmean(len(r["clusters"]) for r in averages) if averages else 0.0,
    }


def measure(options: Any) -> dict[str, Any]:
    seed, batches = options.seed, options.batches
    alone = measured(seed, 1, 1, batches)
    rows = [
        {"interval": interval, "part_s": part_s}
        | {
            way: measured(seed, CLUSTERS, interval, batches, part_s, rests=rests)
            for way, rests in (("rests", True), ("no pause", False))
        }
        for interval in INTERVALS
        for part_s in PARTS_S
    ]
    first = rows[0]["no pause"]
    goals = {
        f"steps overlap by {OVERLAP} in the mean": first["overlap"] >= OVERLAP,
        f"every stage is busy for {BUSY:.0%} of the time": first["least_busy"] >= BUSY,
    }
    return {"alone": alone, "rows": rows, "goals": goals, "met": all(goals.values())}


def show(figures: Mapping[str, Any]) -> None:
    alone = figures["alone"]
    print(f"one cluster: busy {alone['busy']:.2f}, {alone['batches_per_s']:.3f} batches/s")
    for row in figures["rows"]:
        for way in ("rests", "no pause"):
            one = row[way]
            times = one["batches_per_s"] / alone["batches_per_s"]
            print(
                f"interval {row['interval']}, parts {row['part_s']} s late, {way}:"
                f" overlap {one['overlap']:.2f}, busy {one['busy']:.2f} (least {one['least_busy']:.2f}),"
                f" {times:.2f} times the batches of one cluster; {one['averages']} averagings"
                f" of {one['members']:.1f} clusters, {one['averaging_s']:.2f} s each"
            )
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--batches", type=int, default=60, help="batches for each cluster (default: 60)")
    options = parser.parse_args()
    return report.finish("no-pause", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
