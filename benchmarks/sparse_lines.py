"""Time to a loss with outer updates over lines of homes: sparse ones at 5 Mbit/s up, dense ones at 100.

Four clusters of one volunteer each, real processes in the laboratory (root), a GPT of ten million parameters
that averages after every few batches. Each compute worker has a part of a processor for itself, so a batch
takes equally long in every way. All ways train the same batches at the same learning rates. The target is the
loss that dense updates at 100 Mbit/s have after four fifths of the batches. At 5 Mbit/s dense updates are too
slow for a whole run: `--ways "dense, 5 Mbit/s" --averagings 6` says how long one takes.

    python -m benchmarks.sparse_lines
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import clusters, report
from benchmarks.kept_rows import KeptRows, commits
from benchmarks.sparse_outer import FINAL, WARM_UP
from benchmarks.swarm import NEVER, Model
from benchmarks.time_to_loss import SPARSE, late, reached
from hetpeer.bootstrap.run.settings import AveragingSettings, Outer, TrainingSettings
from tests.wanlab.lab import Lab

CLUSTERS, LATENCY_MS, DOWN_MBPS = 4, 20.0, 100.0
CORES = 0.4
"""Part of a processor that each compute worker has. Four take 1.6 of two, which leaves room for daemons."""
WITHIN_S = 3600.0
OUTER = Outer(learning_rate=1.0, momentum=0.0)


@dataclass(frozen=True, slots=True)
class Way:
    sparse: bool
    up_mbps: float


USUAL, THIN = "dense, 100 Mbit/s", "sparse, 5 Mbit/s"
WAYS = {USUAL: Way(False, 100.0), THIN: Way(True, 5.0), "dense, 5 Mbit/s": Way(False, 5.0)}


def training_of(options: Any) -> TrainingSettings:
    """The learning rate rises, then falls to a tenth in a straight line, by the batches of all clusters."""
    steps, warm = CLUSTERS * options.interval * options.averagings, CLUSTERS * WARM_UP
    return TrainingSettings(
        steps=steps,
        batch_size=8,
        microbatch_size=4,
        slot_size=2,
        eval_every=2 * CLUSTERS * options.interval,
        eval_microbatches=16,
        checkpoint_every=NEVER,
        learning_rate=options.rate,
        schedule=((1, 1 / warm), (warm, 1.0), (max(steps, warm + 1), FINAL)),
    )


def one_way(way: Way, seed: int, options: Any) -> dict[str, Any]:
    """A run to its end; bytes are those of all volunteers, with all that is sent besides averagings."""
    averaging = AveragingSettings(interval=options.interval, window_s="all", outer=OUTER)
    network = clusters.network(way.up_mbps, DOWN_MBPS, CLUSTERS, LATENCY_MS, stages=1)
    with Lab(network) as lab, tempfile.TemporaryDirectory(prefix="hetpeer-lines-") as folder:
        found = asyncio.run(
            clusters.trained(
                lab,
                Path(folder),
                Model(
                    width=options.width, layers=options.layers, heads=options.width // 32, sequence_length=64
                ),
                training_of(options),
                averaging,
                links=SPARSE if way.sparse else None,
                seed=seed,
                count=CLUSTERS,
                stages=1,
                cores=CORES,
                within_s=WITHIN_S,
            )
        )
        sent = sum(sum(row[1:]) for row in lab.stats()["pair_bytes"][1:])
    averagings = sum(found["averages"].values())
    return {**found, "bytes_an_averaging": sent / max(1, averagings), "commit": report.commit()}


def measure(options: Any) -> dict[str, Any]:
    """Every way with several seeds; ways take turns."""
    sizes = {name: getattr(options, name) for name in ("width", "layers", "interval", "averagings", "rate")}
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    kept = KeptRows(options.keep)
    for seed in range(options.seed, options.seed + options.rounds):
        for way in options.ways:
            asked = sizes | {"way": way, "seed": seed}
            row = kept.get(asked)
            if row is None:
                row = one_way(WAYS[way], seed, options)
                kept.put(asked, row)
            runs[way].append(row)
            print(f"{way}: {row}", file=sys.stderr, flush=True)
    every = [row for of in runs.values() for row in of]
    figures = {**sizes, "clusters": CLUSTERS, "cores": CORES, "runs": runs, "commits": commits(every)}
    return figures | (judged(runs) if {USUAL, THIN} <= runs.keys() else {})


def judged(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Seconds to the loss of each seed, and whether sparse updates get there as soon."""
    targets = [late(row) for row in runs[USUAL]]
    times = {
        way: [reached(row["evaluations"], target) for row, target in zip(runs[way], targets, strict=True)]
        for way in (USUAL, THIN)
    }
    pairs = zip(times[THIN], times[USUAL], strict=True)
    soon = all(mine is not None and theirs is not None and mine <= theirs for mine, theirs in pairs)
    goals = {"sparse updates at 5 Mbit/s are there as soon as dense ones at 100": soon}
    return {"targets": targets, "reached_s": times, "goals": goals, "met": soon}


def show(figures: dict[str, Any]) -> None:
    for way, rows in figures["runs"].items():
        for number, row in enumerate(rows):
            times = figures.get("reached_s", {}).get(way)
            there = "" if times is None else f", at the target after {times[number] or float('inf'):.0f} s"
            print(
                f"{way:18} held-out loss {row['loss']:.4f}, {row['batches_per_s']:.2f} batches/s, an "
                f"averaging {row['averaging_s']:.1f} s and {row['bytes_an_averaging'] / 1e6:.2f} MB{there}"
            )
    report.show_goals(figures.get("goals", {}))


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value in (("width", 384), ("layers", 6), ("interval", 2), ("averagings", 40), ("rate", 1e-3)):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"(default: {value:g})")
    parser.add_argument("--rounds", type=int, default=1, help="seeds (default: 1)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=[USUAL, THIN])
    parser.add_argument("--keep", type=Path, help="folder with each finished run: one that is cut goes on")
    options = parser.parse_args()
    if options.interval * options.averagings <= clusters.WARM_UP:
        parser.error(f"batches of a cluster: more than {clusters.WARM_UP}, since that many are not timed")
    return report.finish("sparse-lines", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
