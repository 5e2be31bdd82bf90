"""Cost and use of `init --robust`: pipelines that average, one of which sends false
parameters.

Real processes on this machine's loopback: five pipelines of one volunteer each, everybody averages with
everybody after each batch. With the mean and with centered clipping, without liars and with one that sends
ten times its parameters, or the opposite of them (tests/hostile/lies.py). And how much longer the sum of five
parts takes. Median of several.

    python -m benchmarks.robust
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.swarm import NEVER, POLL_S, Model, Site, make_run, running
from hetpeer.bootstrap.run.settings import AveragingSettings, TrainingSettings
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.stages.worker.vector_sums import centered_clip
from tests.hostile.lies import tell

CLUSTERS = 5
LIES = ("", "tenfold", "opposite")
MODEL = Model(width=32, layers=2, heads=2, sequence_length=32)
WITHIN_S = 400.0
ELEMENTS, ROUNDS = 1 << 20, 9
NEAR, FAR = 0.02, 0.1
"""Relative difference of a loss to the honest mean's: at most with clipping; at least without it, else the
lie does no harm.
"""


async def trained(folder: Path, batches: int, seed: int, lie: str, *, robust: bool) -> float:
    """The last held-out loss of a run in which one pipeline lies like that; infinite for one that has to
    halt.
    """
    training = TrainingSettings(
        steps=batches,
        batch_size=24,
        microbatch_size=4,
        slot_size=2,
        learning_rate=3e-3,
        eval_every=NEVER,
        eval_microbatches=16,
        checkpoint_every=NEVER,
    )
    averaging = AveragingSettings(span=1, window_s="all", robust=robust)
    run = make_run(folder, MODEL, 1, training, seed, averaging=averaging)
    told = folder / "liars"
    tell(told, {})
    site = Site((sys.executable, "-P", "-m", "tests.hostile.lies", str(told)))
    async with running(run, folder, CLUSTERS, site=site) as swarm:
        async with asyncio.timeout(WITHIN_S):
            while not all(swarm.has_updated(number) for number in range(1, CLUSTERS + 1)):
                await asyncio.sleep(POLL_S)
                swarm.check()
            peer = Identity.load(swarm.home(CLUSTERS) / "identity.key").peer_id
            tell(told, {peer: lie} if lie else {})
            while True:
                ended = swarm.bootstrap.status is not None
                swarm.feed.poll()
                if any(one.record["kind"] == "halt" for one in swarm.feed.seen):
                    return math.inf
                swarm.check()
                if ended:
                    break
                await asyncio.sleep(POLL_S)
        # whichever cluster's: who is in one that falls apart founds the next
        return [float(one.record["loss"]) for one in swarm.feed.seen if one.record["kind"] == "evaluation"][
            -1
        ]


def seconds(add: Callable[[list[torch.Tensor]], Any], parts: list[torch.Tensor]) -> float:
    began = time.perf_counter()
    add(parts)
    return time.perf_counter() - began


def plain(parts: list[torch.Tensor]) -> torch.Tensor:
    """As the worker adds parts up."""
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total


def cost() -> dict[str, float]:
    """Seconds of one sum either way; they take turns."""
    torch.set_num_threads(1)
    parts = [torch.randn(ELEMENTS) for _ in range(CLUSTERS)]
    took: dict[str, list[float]] = {"sum": [], "clipped": []}
    for _ in range(ROUNDS):
        took["sum"].append(seconds(plain, parts))
        took["clipped"].append(seconds(centered_clip, parts))
    return {way: statistics.median(times) for way, times in took.items()}


def measure(options: Any) -> dict[str, Any]:
    losses: dict[str, list[float]] = {
        f"{way} {lie}".strip(): [] for way in ("mean", "robust") for lie in LIES
    }
    for turn in range(options.rounds):
        for name, known in losses.items():
            way, _, lie = name.partition(" ")
            with tempfile.TemporaryDirectory(prefix="hetpeer-benchmark-") as folder:
                run = trained(Path(folder), options.batches, options.seed + turn, lie, robust=way == "robust")
                known.append(asyncio.run(run))
            print(f"{name}: {known[-1]:.4f}", file=sys.stderr, flush=True)
    middle = {name: statistics.median(known) for name, known in losses.items()}
    honest = middle["mean"]
    apart = {name: loss / honest - 1.0 for name, loss in middle.items()}
    goals = {
        "clipped, the loss is no worse than that of honest means, whoever lies": all(
            apart[name] <= NEAR for name in apart if name.startswith("robust")
        ),
        "the lies do harm to the mean": all(apart[f"mean {lie}"] >= FAR for lie in LIES if lie),
    }
    return {
        "clusters": CLUSTERS,
        "batches": options.batches,
        "losses": {name: [_figure(loss) for loss in known] for name, known in losses.items()},
        "apart": {name: _figure(loss) for name, loss in apart.items()},
        "seconds": cost(),
        "goals": goals,
        "met": all(goals.values()),
    }


def _figure(value: float) -> float | None:
    """None: the run had to halt."""
    return value if math.isfinite(value) else None


def show(figures: dict[str, Any]) -> None:
    for name, apart in figures["apart"].items():
        if apart is None:
            print(f"{name:16} halts: numbers overflow")
        else:
            middle = statistics.median(math.inf if loss is None else loss for loss in figures["losses"][name])
            print(f"{name:16} loss {middle:.4f} ({apart:+.1%})")
    took = figures["seconds"]
    print(f"a sum of {CLUSTERS} parts takes {took['clipped'] / took['sum']:.1f} times as long")
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--batches", type=int, default=100, help="of all pipelines together (default: 100)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind (default: 5)")
    options = parser.parse_args()
    return report.finish("robust", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
