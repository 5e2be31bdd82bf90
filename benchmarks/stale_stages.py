"""Staleness by stage against the same staleness everywhere: the loss after the same batches, and the pace.

*Loss.* A run computes what one machine computes with the same delays (docs/asynchronous.md), so curves are
made on one: of a GPT like that of `benchmarks.stale`, cut into four stages, several seeds, with NAdam. `2 to
0` is staleness 2 at the first stage, and one less at each later one down to 0, but 2 at most. So `3 to 0` is
Ravnest's rule for four stages (Menon et al., 2024, 3.1).

*Pace.* Seconds of a step in virtual time: the product's own schedule on four volunteers in the homes of the
laboratory, with workers that take `--microbatch-ms` for a microbatch, and `--between-ms` for reduce, vote and
commit. A stage that is less stale than others waits for commits. In Ravnest's pipelines each stage decides
alone, and waits for nobody: there `S to 0` is as fast as S everywhere.

Neither depends on how busy the machine is. Curves that are done are noted in `--journal`: interrupted, the
same command goes on where it was.

    python -m benchmarks.stale_stages
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report, stale
from benchmarks.journal import Journal, sources
from benchmarks.networks import network
from benchmarks.swarm import NEVER
from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.stages.pipeline.routes import Hop
from hetpeer.stages.planning.step_estimate import estimate
from hetpeer.stages.planning.uplinks import PeerLink
from hetpeer.stages.planning.virtual_swarm import VirtualVolunteer
from tests.reference.eager_training import train

STAGES, BATCH, HELDOUT = 4, 8, 64
"""Stages; samples of a step, and of an evaluation."""
MODEL = """from hetpeer.examples.gpt import GPT


def build():
    return GPT({width}, 4, 4, {length}, 256)
"""


@dataclass(frozen=True, slots=True)
class Way:
    """Staleness of a run: of all stages, or down to `last` at the last one."""

    staleness: int = 0
    last: int | None = None

    def settings(self) -> dict[str, Any]:
        """Settings of the run's training."""
        return {"staleness": self.staleness, "last_staleness": self.last}


EXACT = "exact"
WAYS: Mapping[str, Way] = {
    EXACT: Way(),
    "1": Way(1),
    "1 to 0": Way(1, 0),
    "2": Way(2),
    "2 to 1": Way(2, 1),
    "2 to 0": Way(2, 0),
    "3": Way(3),
    "3 to 0": Way(3, 0),
}
PAIRS = {"1 to 0": "1", "2 to 0": "2", "3 to 0": "3"}
"""By stage → the same staleness everywhere, which is as fast if each stage decides alone."""
PART = 0.25
"""Share of a microbatch's seconds that its forward takes, at a stage without the loss; as in real runs."""


# ── loss ────────────────────────────────────────────────────────────────────────────────────────────────────


def made(folder: Path, options: argparse.Namespace, seed: int, microbatches: int) -> RunDirectory:
    """A run of the GPT whose batches have so many microbatches."""
    width, length = options.width, options.length
    (folder / "model.py").write_text(MODEL.format(width=width, length=length))
    rise = round(stale.RISE * options.steps)
    training = TrainingSettings(
        steps=options.steps,
        batch_size=BATCH,
        microbatch_size=BATCH // microbatches,
        slot_size=1,
        optimizer=stale.AHEAD,
        learning_rate=stale.GPT.learning_rate,
        schedule=((1, 1 / rise), (rise, 1.0), (options.steps, stale.LEFT)),
        eval_every=options.steps // stale.LOOKS,
        eval_microbatches=HELDOUT // (BATCH // microbatches),
        checkpoint_every=NEVER,
    )
    return create_run(
        folder / "run",
        model=f"{folder}/model.py:build",
        name="stages",
        seed=seed,
        sequence_length=length,
        stages=[STAGES],
        training=training,
    )


def bounds_of(run: RunDirectory, way: Way) -> dict[str, int]:
    """Name of a parameter → the most updates that it is behind."""
    training = run.manifest.training.model_copy(update=way.settings())
    delays = run.manifest.model_copy(update={"training": training}).delays
    return {
        name: delays.behind(way.staleness, 0, block.index)
        for block in run.manifest.blocks
        for name in run.block_spec(block).parameter_specs
    }


def curve(run: RunDirectory, way: Way, steps: int) -> dict[str, float]:
    """Held-out loss by number of updates. What is evaluated begins alone, as in a run."""
    most = TrainingSettings(staleness=way.staleness).most_behind
    behind = [most(step % (steps // stale.LOOKS), step) for step in range(steps)]
    records, _ = train(run.path, behind, bounds_of(run, way))
    return {str(version): loss for version, loss in records["evaluations"].items()}


def curves(options: argparse.Namespace) -> dict[str, list[dict[int, float]]]:
    """Way → the curve of each seed. One seed's ways come one after the other, then the next seed's."""
    about = {"steps": options.steps, "width": options.width, "length": options.length}
    journal = Journal(options.journal, sources=sources("benchmarks"), **about)
    seeds = range(options.seed, options.seed + options.seeds)
    for seed in seeds:
        missing = [way for way in options.ways if f"{way}, seed {seed}" not in journal.done]
        if not missing:
            continue
        with tempfile.TemporaryDirectory(prefix="hetpeer-stages-") as path:
            # the same data and start for all ways; one microbatch, since all of a step are as old
            run = made(Path(path), options, seed, 1)
            for way in missing:
                found = curve(run, WAYS[way], options.steps)
                journal.add(f"{way}, seed {seed}", found)
                print(f"{way}, seed {seed}: {list(found.values())[-1]:.4f}", file=sys.stderr, flush=True)
    return {
        way: [
            {int(version): loss for version, loss in journal.done[f"{way}, seed {seed}"].items()}
            for seed in seeds
        ]
        for way in options.ways
    }


# ── pace ────────────────────────────────────────────────────────────────────────────────────────────────────


def step_s(run: RunDirectory, way: Way, options: argparse.Namespace, microbatch_ms: float) -> float:
    """Seconds from one commit to the next."""
    training = run.manifest.training.model_copy(update=way.settings())
    manifest = run.manifest.model_copy(update={"training": training})
    homes, places = network("homes"), manifest.layouts[0]
    peers = [f"home {number + 1}" for number in range(STAGES)]
    hops = tuple(Hop(peer, begin, end) for peer, (begin, end) in zip(peers, places, strict=True))
    seconds = microbatch_ms / 1000
    machines = {
        peer: VirtualVolunteer(
            forward_s=PART * seconds,
            backward_s=(1 - PART) * seconds,
            uplink=homes["uplink_mbps"][at] * 1e6 / 8,
        )
        for at, peer in enumerate(peers, start=1)
    }
    links = {}
    for (at, one), (other_at, other) in itertools.permutations(enumerate(peers, start=1), 2):
        border = places[min(at, other_at) - 1][1]
        crossing = float(manifest.blocks[border - 1].output_bytes)
        links[one, other] = PeerLink(
            rate=min(homes["uplink_mbps"][at], homes["downlink_mbps"][other_at]) * 1e6 / 8,
            delay_s=homes["latency_ms"][at][other_at] / 1000,
            activation_bytes=crossing,
            gradient_bytes=crossing,
        )
    found = estimate(
        machines,
        links,
        dict.fromkeys(range(options.microbatches), hops),
        options.between_ms / 1000,
        manifest.training.staleness,
        manifest.delays,
    )
    return found.seconds


def judge(found: Mapping[str, Any], seconds: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Loss above that of `exact`, in the mean and of each seed; what staleness by stage takes off it."""
    last = max(found[EXACT][0])
    each = {
        way: [own[last] / exact[last] - 1 for own, exact in zip(runs, found[EXACT], strict=True)]
        for way, runs in found.items()
    }
    mean = {way: statistics.fmean(one[last] for one in runs) for way, runs in found.items()}
    return {
        "loss": mean,
        "worse": {way: loss / mean[EXACT] - 1 for way, loss in mean.items()},
        "worse_each": each,
        "by_stage": {
            way: {
                "less": 1 - mean[way] / mean[same],
                "less_each": [
                    1 - own[last] / other[last] for own, other in zip(found[way], found[same], strict=True)
                ],
                "times_as_long": {pace: one[way] / one[same] for pace, one in seconds.items()},
            }
            for way, same in PAIRS.items()
            if {way, same} <= found.keys()
        },
    }


def show(figures: dict[str, Any]) -> None:
    """Print them."""
    print("held-out loss above that of exact, in the mean (of each seed); seconds of a step:")
    for way, worse in figures["worse"].items():
        of_seeds = ", ".join(f"{100 * one:+.1f}" for one in figures["worse_each"][way])
        paces = ", ".join(f"{one[way]:.3f} s ({pace})" for pace, one in figures["step_s"].items())
        print(f"  {way:8} {100 * worse:+.1f} % ({of_seeds}); {paces}")
    for way, one in figures["by_stage"].items():
        each = ", ".join(f"{100 * less:+.1f}" for less in one["less_each"])
        longer = ", ".join(
            f"{times:.2f} times as long ({pace})" for pace, times in one["times_as_long"].items()
        )
        print(f"{way}: loss {100 * one['less']:+.1f} % lower than with {PAIRS[way]} ({each}); {longer}")


def main() -> int:
    """Command line; exit status 0, since there is no goal."""
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("seeds", 3, "curves of each way"),
        ("steps", 240, "of each curve"),
        ("width", 64, "of the GPT"),
        ("length", 128, "tokens of a sample"),
        ("microbatches", 4, "of a step"),
        ("between-ms", 100, "from a step's last work to its commit at all holders"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument(
        "--microbatch-ms",
        type=float,
        nargs="+",
        default=[20.0, 60.0],
        help="of a microbatch at one stage, one pace for each (default: 20 60)",
    )
    parser.add_argument(
        "--ways", nargs="+", choices=[*WAYS], default=[*WAYS], help="whose loss to compute (default: all)"
    )
    parser.add_argument(
        "--journal",
        type=Path,
        default=Path("stale_stages.journal"),
        help="where to note curves that are done (default: ./stale_stages.journal)",
    )
    options = parser.parse_args()
    options.ways = list(dict.fromkeys([EXACT, *options.ways]))
    found = curves(options)
    with tempfile.TemporaryDirectory(prefix="hetpeer-stages-") as folder:
        run = made(Path(folder), options, options.seed, options.microbatches)
        paces = {
            f"{milliseconds:g} ms": {
                name: step_s(run, way, options, milliseconds) for name, way in WAYS.items()
            }
            for milliseconds in options.microbatch_ms
        }
    assert all(math.isfinite(one) for pace in paces.values() for one in pace.values())
    figures = {"curves": found, "step_s": paces, **judge(found, paces), "met": True}
    return report.finish("stale-stages", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
