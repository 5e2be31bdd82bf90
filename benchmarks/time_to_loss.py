"""Time to a loss for clusters that average, among stragglers (SDPipe's claim: 1.5 to 2.3 times as fast as
all-reduce), with real processes.

The clusters, lines and stragglers (hete-B) of `benchmarks.stragglers`, but batches so small that one cluster
alone learns from noise: without any synchronisation the target must not be reached, or the benchmark shows
nothing. The target is what all-reduce has after four fifths of its batches: the middle of three evaluations,
and of all seeds. The time is from the first batch to the first evaluation at which the middle of three is at
the target. The other ways have half as many batches more, since one that learns less from each may still be
faster. Evaluations are of one cluster, also without synchronisation.

    python -m benchmarks.time_to_loss
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import clusters, report
from benchmarks.clusters import CLUSTERS, STAGES
from benchmarks.kept_rows import KeptRows, commits
from benchmarks.stragglers import LATENCY_MS, Naps
from benchmarks.swarm import NEVER, Model
from hetpeer.bootstrap.run.settings import AveragingSettings, LinkSettings, Outer, TrainingSettings
from tests.wanlab.lab import Lab

SLEEP_S = 1.5
"""Seconds that a straggler is stopped: one and a half batches, as in hete-B."""
LONG = 8
"""Batches between averagings of an outer optimizer."""
ALL, NONE = "all-reduce", "no synchronisation"
WAYS = {
    ALL: AveragingSettings(span=1, window_s="all"),
    NONE: AveragingSettings(span=NEVER, window_s=0.0),
    "grouped": AveragingSettings(),
    "grouped, delayed": AveragingSettings(delayed=True),
    "grouped, corrected": AveragingSettings(corrected=True),
    "every fourth, of all": AveragingSettings(interval=4, window_s="all"),
    "every fourth, of all, delayed": AveragingSettings(interval=4, window_s="all", delayed=True),
    "grouped, outer": AveragingSettings(interval=LONG, outer=Outer()),
    "grouped, sparse outer": AveragingSettings(
        interval=LONG, window_s="all", outer=Outer(learning_rate=1.0, momentum=0.0)
    ),
}
SPARSE = LinkSettings(reduce="topk2")
TRAINING = TrainingSettings(
    steps=320,
    batch_size=12,
    microbatch_size=4,
    slot_size=2,
    eval_every=16,
    eval_microbatches=64,
    checkpoint_every=NEVER,
    learning_rate=1e-2,
)
MODEL = Model(width=16, layers=2, heads=2, sequence_length=32)
MORE = 1.5
"""Batches of the other ways, of all-reduce's."""
SHARE = 0.67
"""Goal: of the time of all-reduce."""
TARGET_AT = 0.8
"""Part of the batches after which all-reduce sets the target."""
LAST = 3
"""Evaluations whose middle counts."""


def reached(evaluations: Sequence[Sequence[float]], target: float) -> float | None:
    """Seconds until the middle of `LAST` evaluations, (seconds, loss) each, is at the target; None: never."""
    for end in range(LAST, len(evaluations) + 1):
        if statistics.median(loss for _, loss in evaluations[end - LAST : end]) <= target:
            return float(evaluations[end - 1][0])
    return None


def late(run: dict[str, Any]) -> float:
    """The middle of the evaluations about `TARGET_AT` of all batches."""
    losses = [loss for _, loss in run["evaluations"]]
    end = round(TARGET_AT * len(losses)) + 1
    return float(statistics.median(losses[end - LAST : end]))


def training_of(way: str) -> TrainingSettings:
    """All-reduce sets the target; the others may need more batches to be there."""
    more = 1.0 if way == ALL else MORE
    return TRAINING.model_copy(update={"steps": round(more * TRAINING.steps)})


def measure(options: Any) -> dict[str, Any]:
    """Every way with several seeds; ways take turns."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    kept = KeptRows(options.keep)
    for turn in range(options.rounds):
        for way in options.ways:
            asked = {"way": way, "seed": options.seed + turn, "batches": training_of(way).steps}
            one = kept.get(asked)
            if one is None:
                naps = Naps(SLEEP_S, options.seed + turn)
                with (
                    Lab(clusters.network(1000.0, 1000.0, latency_ms=LATENCY_MS)) as lab,
                    tempfile.TemporaryDirectory(prefix="hetpeer-time-") as folder,
                ):
                    trained = asyncio.run(_trained(naps, lab, Path(folder), way, options.seed + turn))
                one = {**trained, "commit": report.commit()}
                kept.put(asked, one)
            found[way].append(one)
            print(f"{way}: {one}", file=sys.stderr, flush=True)
    target = statistics.median(late(run) for run in found[ALL])
    usual = _middle(reached(run["evaluations"], target) for run in found[ALL])
    rows = {way: _row(runs, target, usual) for way, runs in found.items()}
    goals = goals_of(rows)
    return {
        "clusters": CLUSTERS,
        "stages": STAGES,
        "latency_ms": LATENCY_MS,
        "batches": TRAINING.steps,
        "rounds": options.rounds,
        "target": target,
        "ways": rows,
        "commits": commits(run for runs in found.values() for run in runs),
        "runs": found,
        "goals": goals,
        "met": all(goals.values()),
    }


async def _trained(naps: Naps, lab: Lab, folder: Path, way: str, seed: int) -> dict[str, Any]:
    links = SPARSE if "sparse" in way else None
    found = await clusters.trained(
        lab, folder, MODEL, training_of(way), WAYS[way], links=links, seed=seed, look=naps.look
    )
    await naps.over()
    return found


def _row(runs: Sequence[dict[str, Any]], target: float, usual: float) -> dict[str, Any]:
    """Figures of one way, the loss after as many batches as all-reduce has; it takes `usual` seconds."""
    times = [reached(run["evaluations"], target) for run in runs]
    share = _middle(times) / usual
    after = TRAINING.steps // TRAINING.eval_every
    return {
        "batches_per_s": statistics.median(run["batches_per_s"] for run in runs),
        "loss": statistics.median(run["evaluations"][after][1] for run in runs),
        "reached_s": times,
        "of_all_reduce": share if math.isfinite(share) else None,
    }


def _middle(times: Iterable[float | None]) -> float:
    """The middle of all seeds; one that never gets there is the last."""
    return statistics.median(math.inf if seconds is None else seconds for seconds in times)


def goals_of(rows: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Whether the target tells anything, and which ways reach it soon enough."""
    goals = {}
    if NONE in rows:
        alone = rows[NONE]["of_all_reduce"]
        goals["without synchronisation that time is not enough"] = alone is None or alone > SHARE
    for way, row in rows.items():
        if way not in (ALL, NONE):
            share = row["of_all_reduce"]
            goals[f"{way}: there in {SHARE:g} of the time of all-reduce"] = (
                share is not None and share <= SHARE
            )
    return goals


def show(figures: dict[str, Any]) -> None:
    print(f"target: {figures['target']:.4f}")
    for way, one in figures["ways"].items():
        times = ", ".join("never" if seconds is None else f"{seconds:.0f} s" for seconds in one["reached_s"])
        share = times if one["of_all_reduce"] is None else f"{times} ({one['of_all_reduce']:.2f})"
        print(
            f"{way:30} {one['batches_per_s']:5.2f} batches/s  loss after "
            f"{TRAINING.steps} {one['loss']:.4f}  {share}"
        )
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3, help="seeds (default: 3)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--keep", type=Path, help="folder with each finished run: one that is cut goes on")
    options = parser.parse_args()
    return report.finish("time-to-loss", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
