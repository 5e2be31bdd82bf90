"""Speed-up by more clusters: time to an evaluation loss with 1, 2, 4 and 8 of them in virtual time, with 1
and 4 of real processes (Ravnest's corollary: as good as linear).

*Virtual.* The very coordinator and volunteers in virtual time, with a small net in torch inside
(tests/simulation/toy_net.py): clusters of two stages whose steps overlap by `--staleness`, that average
with those that are ready. The corollary is of the regime in which the noise of gradients is what is in the
way, and of a learning rate that rises with the number of clusters: so batches are small, four of ten
labels are drawn at random, the loss to reach is one that one cluster has late at its best rate, and each
number of clusters has its own best of a few rates. Several clusters go on until they are there, for
`--more` times as many batches of one stream at most: each of them sees as many fewer of them. What is
measured of staleness stands beside its bound: updates by which a step's parameters were behind, at most
and on average.

*Real.* A small GPT, volunteers in the laboratory (root), each of whose compute workers has a tenth of a
processor of its own, so that four clusters do not need more than this machine's two cores; the time is the
log's. `--samples` makes batches longer beside what daemons do for each.

    python -m benchmarks.speedup
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import clusters as laboratory
from benchmarks import report
from benchmarks.swarm import NEVER, Model
from hetpeer.bootstrap.run.settings import AveragingSettings, TrainingSettings
from hetpeer.dht.base.runtime import dying_with_us
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import updates_behind
from tests.simulation.sim_grouped import GroupedSwarm
from tests.simulation.toy_net import CLASSES, SETTINGS, ToyNet
from tests.wanlab.lab import Lab

CLUSTERS = (1, 2, 4, 8)
BLOCKS, STAGES = 4, 2
LATENCY_S = (0.02, 0.02)
LIMIT_S = 20_000.0
PART = 0.8
"""Share of the batches after which one cluster, at its best rate, has the loss that is to be reached."""
NOISE = 0.4
"""Share of labels that are drawn at random."""
EVALUATED = 32
"""Microbatches of an evaluation in virtual time."""
SMOOTH = 5
"""Evaluations whose middle one says where the loss is."""
RATES = (6e-3, 1.2e-2, 2.4e-2, 4.8e-2)
"""Learning rates that are tried."""
MICROBATCHES = 2
LINEAR = 0.7
"""Goal for four clusters, as a share of their number."""
REAL: Mapping[int, Sequence[float]] = {1: (1e-3, 2e-3), 4: (2e-3, 4e-3)}
"""Clusters of processes → learning rates that are tried."""
CORES = 0.1
"""Part of a processor that each of their compute workers has."""
MODEL = Model(width=64, layers=4, heads=2, sequence_length=32)

KINDS = "virtual", "real"

Found = Mapping[int, Mapping[float, "Sequence[Curve]"]]
"""Clusters → learning rate → a curve for each seed."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One history: (virtual seconds, evaluation loss), and by how many updates each step was behind."""

    evaluations: Sequence[tuple[float, float]]
    behind: Sequence[int]
    batches_per_s: float | None = None
    """Batches a second of all clusters together; None in virtual time, where it is not measured."""

    def seconds_to(self, target: float) -> float | None:
        for place in range(SMOOTH, len(self.evaluations) + 1):
            lately = self.evaluations[place - SMOOTH : place]
            if statistics.median(loss for _, loss in lately) <= target:
                return lately[-1][0]
        return None


class NoisyNet(ToyNet):
    """Net whose gradients stay noisy: a share NOISE of the labels is random; each evaluation has the same
    samples.
    """

    def microbatch(self, step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        step = 0 if number >= MICROBATCHES else step
        inputs, classes = super().microbatch(step, number)
        generator = torch.Generator().manual_seed(step * 1009 + number)
        drawn = torch.rand(len(classes), generator=generator) < NOISE
        return inputs, torch.where(drawn, torch.randint(CLASSES, classes.shape, generator=generator), classes)


class ThereError(Exception):
    """The loss is reached."""


def trained(seed: int, target: float | None, clusters: int, rate: float, options: Any) -> Curve:
    """One history of so many clusters: with `target`, until it is reached."""
    torch.set_num_threads(1)
    net = NoisyNet(BLOCKS, seed, {**SETTINGS, "learning_rate": rate})
    cut = BLOCKS // STAGES
    config = HistoryConfig(
        volunteers=STAGES * clusters,
        layouts=(tuple((stage * cut, (stage + 1) * cut) for stage in range(STAGES)),),
        steps=options.batches if target is None else options.more * options.batches,
        microbatches=MICROBATCHES,
        evaluation_microbatches=EVALUATED,
        evaluate_every=2 * options.every,
        slot_capacity=2,
        ties=net.ties,
        checkpoint_every=NEVER,
        staleness=options.staleness,
        clip_norm=0.5,
        latency_s=LATENCY_S,
        speeds=(1.0,),
        duplicates=0.0,
    )
    swarm = GroupedSwarm(
        seed, config, net, Coverage(), span=AveragingSettings().span, interval=options.interval, delayed=True
    )
    at: list[float] = []

    def curve() -> Curve:
        losses = [float(record["loss"]) for record in swarm.log if record["kind"] == "evaluation"]
        return Curve(list(zip(at, losses, strict=False)), updates_behind(swarm.log))

    def happened(what: str) -> None:
        if what == "record evaluation":
            at.append(swarm.world.now)
            if target is not None and curve().seconds_to(target) is not None:
                raise ThereError

    swarm.hooks.append(happened)
    with contextlib.suppress(ThereError):
        swarm.run(LIMIT_S)
    return curve()


def virtual(options: Any, pool: ProcessPoolExecutor) -> Found:
    seeds = range(options.seed, options.seed + options.seeds)
    targets: Sequence[float | None] = [None] * options.seeds
    found: dict[int, dict[float, list[Curve]]] = {}
    for clusters in options.clusters:
        found[clusters] = {
            rate: list(
                pool.map(partial(trained, clusters=clusters, rate=rate, options=options), seeds, targets)
            )
            for rate in options.rates
        }
        targets = targets_of(found)
    return found


def real(options: Any) -> Found:
    """Ways take turns."""
    found: dict[int, dict[float, list[Curve]]] = {c: {rate: [] for rate in REAL[c]} for c in REAL}
    for seed in range(options.seed, options.seed + options.real_seeds):
        for clusters, rates in REAL.items():
            for rate in rates:
                batches = options.real_batches * (1 if clusters == 1 else options.more)
                found[clusters][rate].append(really_trained(seed, clusters, rate, batches, options))
                last = found[clusters][rate][-1].evaluations[-1]
                print(f"{clusters} clusters of processes, {rate}: {last}", file=sys.stderr, flush=True)
    return found


def really_trained(seed: int, clusters: int, rate: float, batches: int, options: Any) -> Curve:
    """One run of so many clusters of processes."""
    training = TrainingSettings(
        steps=batches,
        batch_size=MICROBATCHES * options.samples,
        microbatch_size=options.samples,
        slot_size=2,
        eval_every=options.every,
        eval_microbatches=16,
        checkpoint_every=NEVER,
        learning_rate=rate,
        staleness=options.staleness,
    )
    averaging = AveragingSettings(interval=options.interval, delayed=True)
    with (
        Lab(laboratory.network(1000.0, 1000.0, clusters)) as lab,
        tempfile.TemporaryDirectory(prefix="hetpeer-speedup-") as folder,
    ):
        one = asyncio.run(
            laboratory.trained(
                lab, Path(folder), MODEL, training, averaging, seed=seed, count=clusters, cores=CORES
            )
        )
    return Curve(one["evaluations"], one["behind"], one["batches_per_s"])


def targets_of(found: Found) -> list[float]:
    """For each seed the loss to reach."""
    alone = found[1].values()
    return [min(_at(curve, PART) for curve in of_seed) for of_seed in zip(*alone, strict=True)]


def compared(found: Found) -> dict[str, Any]:
    """Each number of clusters at its best rate, beside one cluster at its best."""
    targets = targets_of(found)
    best = {
        clusters: min(rates.items(), key=lambda one: _middle(one[1], targets))
        for clusters, rates in found.items()
    }
    rows = {
        clusters: {"rate": rate, **_row(curves, targets, best[1][1])}
        for clusters, (rate, curves) in best.items()
    }
    return {"targets": targets, "clusters": rows}


def measure(options: Any, pool: ProcessPoolExecutor) -> dict[str, Any]:
    figures = {}
    if options.kind != "real":
        figures["virtual"] = compared(virtual(options, pool))
    if options.kind != "virtual":
        figures["real"] = compared(real(options))
    fours = [found["clusters"][4]["faster"] for found in figures.values()]
    return {
        "staleness": options.staleness,
        "interval": options.interval,
        "batches": options.batches,
        "samples": options.samples,
        "rates": list(options.rates),
        **figures,
        "met": all(four is not None and four >= 4 * LINEAR for four in fours),
    }


def _at(curve: Curve, part: float) -> float:
    """The loss after so much of the batches."""
    losses = [loss for _, loss in curve.evaluations]
    return statistics.median(losses[int(part * len(losses)) - SMOOTH :][:SMOOTH])


def _middle(curves: Sequence[Curve], targets: Sequence[float]) -> float:
    """Seconds to the loss; infinite where most do not get there."""
    return statistics.median(
        math.inf if (seconds := curve.seconds_to(target)) is None else seconds
        for curve, target in zip(curves, targets, strict=True)
    )


def _row(curves: Sequence[Curve], targets: Sequence[float], alone: Sequence[Curve]) -> dict[str, Any]:
    seconds = [curve.seconds_to(target) for curve, target in zip(curves, targets, strict=True)]
    before = [curve.seconds_to(target) for curve, target in zip(alone, targets, strict=True)]
    ratios = [b / s for b, s in zip(before, seconds, strict=True) if b is not None and s is not None]
    late = [behind for curve in curves for behind in curve.behind]
    speeds = [curve.batches_per_s for curve in curves if curve.batches_per_s is not None]
    return {
        "batches_per_s": statistics.median(speeds) if speeds else None,
        "seconds": seconds,
        "faster": statistics.median(ratios) if len(ratios) == len(curves) else None,
        "staleness": {"mean": statistics.fmean(late), "most": max(late)},
    }


def show(figures: Mapping[str, Any]) -> None:
    for kind in (kind for kind in KINDS if kind in figures):
        for clusters, row in figures[kind]["clusters"].items():
            faster = "not reached" if row["faster"] is None else f"{row['faster']:.2f}x as fast"
            late, speed = row["staleness"], row["batches_per_s"]
            batches = "" if speed is None else f", {speed:.2f} batches a second"
            print(
                f"{kind}: {clusters} clusters: {faster}{batches}; {late['mean']:.2f} updates behind, "
                f"{late['most']} at most of {figures['staleness']}"
            )
    print(f"  goal {4 * LINEAR:.1f}x with 4: {'met' if figures['met'] else 'MISSED'}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("seeds", 5, "histories of each"),
        ("batches", 1600, "of the history of one cluster"),
        ("more", 3, "times as many that several clusters may train on"),
        ("every", 10, "batches between evaluations of processes, twice as many in virtual time"),
        ("interval", 1, "batches between averagings"),
        ("staleness", 1, "steps that begin before the one that they follow is committed"),
        ("jobs", 2, "processes"),
        ("real-seeds", 3, "runs of processes, of each"),
        ("real-batches", 240, "of these runs, with one cluster"),
        ("samples", 2, "in a microbatch of these runs"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument(
        "--clusters", type=int, nargs="+", default=CLUSTERS, help="numbers of clusters, 1 and 4 among them"
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=RATES, help="learning rates in virtual time"
    )
    parser.add_argument("--kind", choices=KINDS, help="one of both alone")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs, initializer=dying_with_us()) as pool:
        figures = measure(options, pool)
    return report.finish("-".join(filter(None, ("speedup", options.kind))), figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
