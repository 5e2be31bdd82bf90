"""Effect of the choices of grouped runs on time and loss: one run of real processes for each, on the same
batches, side by side.

Four clusters in the laboratory (root), with the uplinks of homes. `grouped` is the default; the others change
one thing each: Adam's second moments corrected for the mean, delayed averagings, sums in 8 bits, both of
these, and averaging after eight batches instead of one, without and with an outer optimizer. Ways take turns;
figures are the middle of several seeds, the loss that of the stored result on held-out text.

    python -m benchmarks.curves
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import clusters, report
from benchmarks.clusters import CLUSTERS, LATENCY_MS, STAGES
from benchmarks.swarm import NEVER, Model
from hetpeer.bootstrap.run.settings import AveragingSettings, LinkSettings, Outer, TrainingSettings
from tests.wanlab.lab import Lab

UP_MBPS, DOWN_MBPS = 20.0, 100.0
LONG = 8
"""Batches between averagings, where they are rare."""
PLAIN, EIGHT_BITS = LinkSettings(), LinkSettings(reduce="int8")
WAYS = {
    "grouped": (AveragingSettings(), PLAIN),
    "corrected": (AveragingSettings(corrected=True), PLAIN),
    "delayed": (AveragingSettings(delayed=True), PLAIN),
    "int8": (AveragingSettings(), EIGHT_BITS),
    "delayed, int8": (AveragingSettings(delayed=True), EIGHT_BITS),
    "every 8": (AveragingSettings(interval=LONG), PLAIN),
    "every 8, outer": (AveragingSettings(interval=LONG, outer=Outer()), PLAIN),
}
MODEL = Model(width=64, layers=4, heads=2, sequence_length=64)
TRAINING = TrainingSettings(
    steps=200,
    batch_size=16,
    microbatch_size=8,
    slot_size=2,
    eval_every=25,
    eval_microbatches=16,
    checkpoint_every=NEVER,
    learning_rate=1e-3,
)


def measure(options: Any) -> dict[str, Any]:
    """Every way, with several seeds."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    for turn in range(options.rounds):
        for way in options.ways:
            averaging, links = WAYS[way]
            with (
                Lab(clusters.network(UP_MBPS, DOWN_MBPS)) as lab,
                tempfile.TemporaryDirectory(prefix="hetpeer-curves-") as folder,
            ):
                one = asyncio.run(
                    clusters.trained(
                        lab, Path(folder), MODEL, TRAINING, averaging, links=links, seed=options.seed + turn
                    )
                )
            found[way].append(one)
            print(f"{way}: {one}", file=sys.stderr, flush=True)
    return {
        "clusters": CLUSTERS,
        "stages": STAGES,
        "latency_ms": LATENCY_MS,
        "mbps": [UP_MBPS, DOWN_MBPS],
        "batches": TRAINING.steps,
        "rounds": options.rounds,
        "ways": {way: _middle(runs) for way, runs in found.items()},
        "runs": found,
    }


def _middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    batches = sorted(set.intersection(*(set(run["curve"]) for run in runs)))
    return {
        **{
            name: statistics.median(run[name] for run in runs)
            for name in ("batches_per_s", "averaging_s", "loss")
        },
        "curve": {batch: statistics.median(run["curve"][batch] for run in runs) for batch in batches},
    }


def show(figures: dict[str, Any]) -> None:
    ways = figures["ways"]
    usual = next(iter(ways.values()))
    for way, one in ways.items():
        speed, loss = one["batches_per_s"] / usual["batches_per_s"], one["loss"] / usual["loss"] - 1
        print(
            f"{way:15} {one['batches_per_s']:5.2f} batches/s ({speed:.2f})  an averaging "
            f"{one['averaging_s']:5.2f} s"
            f"  loss {one['loss']:.4f} ({100 * loss:+.2f} %)"
        )
    print("loss by batch:")
    for way, one in ways.items():
        print(f"{way:15} " + "  ".join(f"{batch}: {loss:.3f}" for batch, loss in one["curve"].items()))


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="seeds (default: 5)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args()
    figures = measure(options)
    return report.finish("curves", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
