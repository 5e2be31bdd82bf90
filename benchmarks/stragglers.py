"""Cost of stragglers for clusters that average: SDPipe's settings (Miao et al., VLDB 2023, section 5) with
real processes.

Four clusters in the laboratory (root), so far from each other that a batch takes 1.8 s and this machine's two
cores are idle for most of it, so waiting costs time. The paper stops a worker for 0.2 s (`hete-A`) or 0.6 s
(`hete-B`) after one batch in ten and does not say what a batch takes; here a worker is stopped (SIGSTOP) for
half a batch or one and a half, as where a batch takes the paper's clusters 0.4 s (four stages of 0.1 s).
`homogeneous`: nobody is. One batch of every ten of a cluster, at random, rather than each with a chance of a
tenth: so short a run would see half as many or twice as many. Each way trains the same batches to the end:
without any synchronisation until the end, with groups of those that are ready (a span of ten), the same while
the next batch is trained (`--delayed`), and all-reduce. Speed is batches a second between the warm-up and the
last batch, loss that of the averaged result; ways take turns, the middle of several runs.

    python -m benchmarks.stragglers
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import clusters, report
from benchmarks.clusters import CLUSTERS, STAGES
from benchmarks.swarm import NEVER, Model, Swarm
from hetpeer.bootstrap.log.volunteer_log import read_event, read_events
from hetpeer.bootstrap.run.settings import AveragingSettings, TrainingSettings
from hetpeer.peer.demo.demo_run import Seen
from tests.wanlab.lab import Lab

LATENCY_MS = 100.0
SLEEPS = {"homogeneous": 0.0, "hete-A": 0.9, "hete-B": 2.7}
"""Seconds."""
ONE_OF = 10
"""Batches of a cluster."""
WAYS = {
    "no synchronisation": AveragingSettings(span=NEVER, window_s=0.0),
    "grouped": AveragingSettings(),
    "grouped, delayed": AveragingSettings(delayed=True),
    "all-reduce": AveragingSettings(span=1, window_s="all"),
}
GROUPED = [way for way in WAYS if way.startswith("grouped")]
SHARE, LOSS_WITHIN = 0.9, 0.02
TRAINING = TrainingSettings(
    steps=120,
    batch_size=48,
    microbatch_size=4,
    slot_size=2,
    eval_every=NEVER,
    eval_microbatches=16,
    checkpoint_every=NEVER,
    learning_rate=1e-3,
)
MODEL = Model(width=16, layers=2, heads=2, sequence_length=32)
"""So small that an averaging takes a few trips, half a batch, and no slow start; in the paper it takes a
twentieth of a batch.
"""


class Naps:
    """Stops a worker of a cluster for `seconds` after one of its batches in ten."""

    def __init__(self, seconds: float, seed: int) -> None:
        self._seconds = seconds
        self._seed = seed
        self._trained: Counter[int] = Counter()
        self._tired: list[int] = []
        """Clusters that are to nap as soon as a worker of theirs is known."""
        self._napping: set[asyncio.Task[None]] = set()
        self._workers: dict[int, psutil.Process] = {}
        """Cluster → a worker of it, the first that is found."""

    def look(self, swarm: Swarm, new: Sequence[Seen]) -> None:
        """Whoever has trained a batch since the last look may be a straggler in the next one."""
        for seen in new:
            if self._seconds and seen.record["kind"] == "commit" and self._due(seen.record.get("cluster", 0)):
                self._tired.append(seen.record.get("cluster", 0))
        found = {cluster: self._worker(swarm, cluster) for cluster in self._tired}
        self._tired = [cluster for cluster in self._tired if found[cluster] is None]
        for worker in filter(None, found.values()):
            task = asyncio.create_task(self._nap(worker))
            self._napping.add(task)
            task.add_done_callback(self._napping.discard)

    def _due(self, cluster: int) -> bool:
        """Counts one more batch of `cluster`. The same batches whichever way they are trained."""
        ten, position = divmod(self._trained[cluster], ONE_OF)
        self._trained[cluster] += 1
        return position == random.Random(f"{self._seed} {cluster} {ten}").randrange(ONE_OF)

    async def _nap(self, worker: psutil.Process) -> None:
        worker.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(self._seconds)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # the run may have ended meanwhile
                worker.send_signal(signal.SIGCONT)

    def _worker(self, swarm: Swarm, cluster: int) -> psutil.Process | None:
        """None as long as no volunteer has written that it is in `cluster`: right after the first batch."""
        if cluster not in self._workers:
            members = (n for n in swarm.volunteers if cluster_of(swarm, n) == cluster)
            if (number := next(members, None)) is None:
                return None
            worker = swarm.worker(number)
            assert worker is not None
            self._workers[cluster] = worker
        return self._workers[cluster]

    async def over(self) -> None:
        await asyncio.gather(*self._napping)


def cluster_of(swarm: Swarm, number: int) -> int:
    """Which cluster volunteer `number` is in, by its own log."""
    path = swarm.home(number) / "runs" / swarm.run.run_id / "events.jsonl"
    lines = list(read_events(path))
    return int(read_event(lines[-1][1])[1]["cluster"]) if lines else -1


async def trained(
    averaging: AveragingSettings, sleep_s: float, seed: int, lab: Lab, folder: Path
) -> dict[str, Any]:
    """One run to its end."""
    naps = Naps(sleep_s, seed)
    found = await clusters.trained(lab, folder, MODEL, TRAINING, averaging, look=naps.look)
    await naps.over()
    return found


def measure(options: Any) -> dict[str, Any]:
    """Every setting, every way, several times; ways take turns.

    What the rounds so far have shown is kept after each.
    """
    found: dict[str, dict[str, list[dict[str, Any]]]] = {s: {w: [] for w in WAYS} for s in SLEEPS}
    figures: dict[str, Any] = {}
    for turn in range(options.rounds):
        for setting, sleep_s in SLEEPS.items():
            for way, averaging in WAYS.items():
                with (
                    Lab(clusters.network(1000.0, 1000.0, latency_ms=LATENCY_MS)) as lab,
                    tempfile.TemporaryDirectory(prefix="hetpeer-stragglers-") as folder,
                ):
                    one = asyncio.run(trained(averaging, sleep_s, options.seed + turn, lab, Path(folder)))
                found[setting][way].append(one)
                print(f"{setting} {way}: {one}", file=sys.stderr, flush=True)
        figures = so_far(found, turn + 1)
        report.keep("stragglers", figures, seed=options.seed)
    return figures


def so_far(found: dict[str, dict[str, list[dict[str, Any]]]], rounds: int) -> dict[str, Any]:
    rows = {s: {w: middle(runs) for w, runs in ways.items()} for s, ways in found.items()}
    return {
        "clusters": CLUSTERS,
        "stages": STAGES,
        "latency_ms": LATENCY_MS,
        "batches": TRAINING.steps,
        "rounds": rounds,
        "settings": rows,
        "runs": found,
        "goals": (judged := goals(rows)),
        "met": all(judged.values()),
    }


def middle(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in ("batches_per_s", "loss")}


def goals(rows: dict[str, dict[str, dict[str, float]]]) -> dict[str, bool]:
    def rate(setting: str, way: str) -> float:
        return rows[setting][way]["batches_per_s"]

    return {
        goal: met
        for way in GROUPED
        for goal, met in (
            (
                f"{way}: nine tenths of the speed without synchronisation",
                all(rate(s, way) >= SHARE * rate(s, "no synchronisation") for s in rows),
            ),
            (
                f"{way}: faster than all-reduce among stragglers",
                all(rate(s, way) > rate(s, "all-reduce") for s in ("hete-A", "hete-B")),
            ),
            (
                f"{way}: loss within 2 % of all-reduce's",
                all(
                    math.isclose(rows[s][way]["loss"], rows[s]["all-reduce"]["loss"], rel_tol=LOSS_WITHIN)
                    for s in rows
                ),
            ),
        )
    }


def show(figures: dict[str, Any]) -> None:
    for setting, ways in figures["settings"].items():
        alone = ways["no synchronisation"]["batches_per_s"]
        for way, one in ways.items():
            rate = one["batches_per_s"]
            print(f"{setting:12} {way:20} {rate:6.2f} batches/s ({rate / alone:.2f})  loss {one['loss']:.4f}")
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: 5)")
    options = parser.parse_args()
    figures = measure(options)
    return report.finish("stragglers", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
