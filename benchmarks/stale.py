"""Costs and gains of steps that overlap: the loss after as many samples, and the time to the same loss in
the homes of the laboratory.

*Loss.* A run computes what one machine computes with the same delays (docs/asynchronous.md), so curves are
made on one: of a GPT on text, several seeds, and of a ResNet with BatchNorm on digits, one for each fold that
is left out; each step with parameters that are `staleness` updates old, with AdamW, with NAdam, which looks
ahead, with gradients that are compensated, with steps that overlap only once the learning rate has risen, and
with half of a step's microbatches as old. The learning rate rises, and falls to nothing, as it does where a
loss counts. A way's loss is the mean of its curves': of the ResNet's single ones, which are near nothing at
the end, none says anything (another processor's rounding has moved one by two fifths). What chance makes of
such a mean, other seeds say. Curves that are done are noted in `--journal`: interrupted, the same command
goes on where it was.

*Time.* Seconds of a step of the same GPT, with the same microbatches, in the laboratory (root), four stages
in four homes, of hetpeer with and without staleness, and of torch's 1F1B over gloo; ways take turns. Time to
a loss is steps to it, by the curves, times the middle step, which is that of all ways with the same
staleness: what is made of a gradient takes no time beside it, and those that are fresh take as long as
without staleness. No timed step evaluates. Both goals are one way's: that which is soonest at the loss of
those whose loss is near enough.

    python -m benchmarks.stale --jobs 2
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import adaptive, report
from benchmarks.adaptive import FOLDS, Subject
from benchmarks.endtoend_ways import PEERS, WITHIN_S, torch_pipeline
from benchmarks.journal import Journal, sources
from benchmarks.networks import network
from benchmarks.swarm import NEVER, Site, running
from hetpeer.averaging.optim.adam import AdamW, NAdam
from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import LinkSettings
from hetpeer.dht.base.runtime import dying_with_us
from tests.reference.reference_run import run_reference
from tests.wanlab.lab import Lab

ADAM, AHEAD = AdamW(), NAdam(name="NAdam", betas=(0.95, 0.95))
LAMBDA = 1.0


@dataclass(frozen=True, slots=True)
class Way:
    """How a run is trained."""

    staleness: int = 0
    optimizer: AdamW | NAdam = ADAM
    compensation: float = 0.0
    """λ."""
    head_start: int | None = None
    """Microbatches."""
    fresh: float = 0.0
    """Share of the steps that do not overlap, the first ones."""
    other_seeds: int = 0
    """What is added to a curve's seed (its fold stays): what chance makes of a loss."""

    def fresh_of(self, steps: int) -> int:
        """So many of the first `steps` steps of a run do not overlap."""
        return round(self.fresh * steps)

    def settings(self, steps: int) -> dict[str, Any]:
        """Of a run of so many steps."""
        names = ("staleness", "optimizer", "compensation", "head_start")
        return {name: getattr(self, name) for name in names} | {"fresh_steps": self.fresh_of(steps)}


HALF = 2
"""Microbatches of a step that are computed early: half of them."""
RISE, LEFT = 0.1, 0.02
"""The learning rate rises for so much of the steps; what is left of it at the last one."""
WAYS: Mapping[str, Way] = {
    "exact": Way(),
    "exact, other seeds": Way(other_seeds=100 * FOLDS),
    "staleness 1": Way(1),
    "staleness 2": Way(2),
    "staleness 1, NAdam": Way(1, AHEAD),
    "staleness 2, NAdam": Way(2, AHEAD),
    "staleness 2, compensated": Way(2, ADAM, LAMBDA),
    "staleness 1, NAdam, fresh start": Way(1, AHEAD, fresh=RISE),
    "head start, NAdam": Way(1, AHEAD, head_start=HALF),
}
TORCH = "torch 1F1B"
TIMED = {
    "exact": "exact",
    "staleness 1": "staleness 1",
    "staleness 2": "staleness 2",
    "head start": "head start, NAdam",
}
"""What decides how long a step is → a way of which it is so."""
GPT = replace(adaptive.SUBJECTS[0], samples=2)
"""On few samples a step, as it is timed: where lines carry all the time, no schedule makes steps shorter."""
SUBJECTS = (GPT, adaptive.SUBJECTS[1])
LOOKS = 20
"""Evaluations of a curve, at the same distance."""
HELDOUT = 320
"""Images that are looked at; of text, what `adaptive` looks at."""
WORSE, FASTER = 0.03, 1.5
"""Goals: what a loss may be worse by at equal samples, and how much sooner the same loss is there."""


def made(
    subject: Subject,
    way: str,
    folder: Path,
    options: Any,
    seed: int,
    stages: Sequence[int] = (),
    **other: Any,
) -> RunDirectory:
    """A run of `subject`; `seed` is the fold that is left out of images, and `other` are settings of its
    training.
    """
    steps = steps_of(subject, options)
    plain = subject.make(folder, LinkSettings(), options.microbatches, steps, seed)
    rise = round(RISE * steps)
    update = {
        **WAYS[way].settings(steps),
        "schedule": ((1, 1 / rise), (rise, 1.0), (steps, LEFT)),
        "eval_every": steps // LOOKS,
    }
    if subject.images:
        update["eval_microbatches"] = HELDOUT // subject.samples
    return create_run(
        folder / "way",
        model=f"{folder}/model.py:build",
        data=[f"{folder}/data.py:data"] if subject.images else [],
        name="stale",
        seed=seed,
        sequence_length=128,
        stages=stages,
        training=plain.manifest.training.model_copy(update=update | other),
    )


def steps_of(subject: Subject, options: Any) -> int:
    """Of each of its curves."""
    return int(options.image_steps if subject.images else options.steps)


def seeds_of(subject: Subject, options: Any) -> range:
    """Of its curves: of images, each leaves out another fold."""
    return range(options.seed, options.seed + (FOLDS if subject.images else options.seeds))


def curve(subject: Subject, way: str, options: Any, seed: int) -> dict[str, float]:
    """Held-out loss by number of updates."""
    steps = steps_of(subject, options)
    with tempfile.TemporaryDirectory(prefix="hetpeer-stale-") as path:
        run = made(subject, way, Path(path), options, seed + WAYS[way].other_seeds)
        most = run.manifest.training.most_behind
        behind = [most(step % (steps // LOOKS), step) for step in range(steps)]
        found: dict[str, float] = run_reference(run.path, steps, behind).records["evaluations"]
    return found


def curves(options: Any) -> dict[str, dict[str, list[dict[int, float]]]]:
    """Subject → way → one for each seed, or fold."""
    about = {"steps": [steps_of(one, options) for one in SUBJECTS], "microbatches": options.microbatches}
    journal = Journal(options.journal, sources=sources("benchmarks"), **about)
    wanted = {
        f"{subject.name}, {way}, seed {seed}": (subject, way, options, seed)
        for subject in SUBJECTS
        for seed in seeds_of(subject, options)
        for way in WAYS
    }
    # in processes: torch.export is for one thread of each
    with ProcessPoolExecutor(options.jobs, initializer=dying_with_us()) as pool:
        started = {
            pool.submit(curve, *task): part for part, task in wanted.items() if part not in journal.done
        }
        for one in as_completed(started):
            part, found = started[one], one.result()
            journal.add(part, found)
            print(f"{part}: {list(found.values())[-1]:.4f}", file=sys.stderr, flush=True)
    return {
        subject.name: {
            way: [
                {
                    int(version): loss
                    for version, loss in journal.done[f"{subject.name}, {way}, seed {seed}"].items()
                }
                for seed in seeds_of(subject, options)
            ]
            for way in WAYS
        }
        for subject in SUBJECTS
    }


def worse(ways: Mapping[str, Sequence[Mapping[int, float]]]) -> dict[str, float]:
    """Excess of the last loss (mean of the curves) over that of `exact`."""
    last = max(ways["exact"][0])
    losses = {way: statistics.fmean(one[last] for one in runs) for way, runs in ways.items()}
    return {way: loss / losses["exact"] - 1 for way, loss in losses.items()}


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────


def timed_run(folder: Path, options: Any, way: str) -> RunDirectory:
    """A run of the GPT, as long as the clock runs, with the way's staleness (torch reads but its task)."""
    folder.mkdir()
    changed = {"steps": options.settle + options.timed, "eval_every": NEVER}
    return made(GPT, TIMED.get(way, "exact"), folder, options, options.seed, [PEERS], **changed)


async def step_s(folder: Path, options: Any, way: str) -> float:
    """The middle step."""
    run, settle = timed_run(folder, options, way), int(options.settle)
    with Lab(network("homes")) as lab:
        if way == TORCH:
            return (await torch_pipeline(run, folder, lab, run.manifest.training.steps)).middle(settle)
        async with running(run, folder, PEERS, site=Site(lab=lab)) as peers:
            await peers.until(run.manifest.training.steps, WITHIN_S)
            ends = [seen.at for seen in peers.feed.seen if seen.record["kind"] == "commit"]
    return (ends[-1] - ends[settle - 1]) / (len(ends) - settle)


async def times(options: Any, folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {way: [] for way in (*TIMED, TORCH)}
    for turn in range(options.rounds):
        for way, each in found.items():
            each.append(await step_s(folder / f"{turn}-{way}", options, way))
            print(f"{way}: {each[-1]:.2f} s a step", file=sys.stderr, flush=True)
    return found


# ── both ────────────────────────────────────────────────────────────────────────────────────────────────────


def steps_to(target: float, runs: Sequence[Mapping[int, float]]) -> float | None:
    """The middle of the seeds; None where most do not get there."""
    there = sorted(
        next((step for step, loss in sorted(one.items()) if step and loss <= target), NEVER) for one in runs
    )
    middle = statistics.median(there)
    return None if middle >= NEVER else middle


def judge(found: Mapping[str, Any], seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    losses = {subject: worse(ways) for subject, ways in found.items()}
    ways = found[GPT.name]
    *_, before_last, last = sorted(ways["exact"][0])
    target = max(one[before_last] for one in ways["exact"])
    middle = {way: statistics.median(each) for way, each in seconds.items()}
    to_loss: dict[str, float | None] = {}
    for way in (*WAYS, TORCH):
        steps = steps_to(target, ways.get(way, ways["exact"]))  # torch's pipeline computes what exact does
        fresh = min(WAYS.get(way, WAYS["exact"]).fresh_of(last), steps or 0)
        of = way.partition(",")[0]
        to_loss[way] = None if steps is None else fresh * middle["exact"] + (steps - fresh) * middle[of]

    def near(way: str) -> bool:
        return all(one[way] <= WORSE for one in losses.values())

    def sooner(way: str) -> dict[str, float]:
        """How many times as long the others take; 0 if it does not get there."""
        own = to_loss[way]
        return {of: (to_loss[of] or math.inf) / own if own else 0.0 for of in ("exact", TORCH)}

    stale = [name for name, way in WAYS.items() if way.staleness]
    judged = min(stale, key=lambda way: (not near(way), to_loss[way] or math.inf))
    return {
        "worse": losses,
        "target_loss": target,
        "step_s": middle,
        "seconds_to_loss": to_loss,
        "judged": judged,
        "sooner": {way: sooner(way) for way in stale},
        "goals": {
            f"{judged}: after as many samples at most {WORSE:.0%} above exact": near(judged),
            **{
                f"{judged}: at the same loss {FASTER} times sooner than {of}": times >= FASTER
                for of, times in sooner(judged).items()
            },
        },
    }


def show(figures: dict[str, Any]) -> None:
    for subject, ways in figures["worse"].items():
        print(
            f"{subject}: held-out loss above that of exact: "
            + ", ".join(f"{way} {100 * by:+.1f} %" for way, by in ways.items())
        )
    print(f"GPT in homes, to a held-out loss of {figures['target_loss']:.3f}:")
    for way, seconds in figures["seconds_to_loss"].items():
        print(f"  {way:24} {seconds:7.0f} s" if seconds else f"  {way:24} not reached")
    print("a step: " + ", ".join(f"{way} {one:.2f} s" for way, one in figures["step_s"].items()))
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("seeds", 3, "of each curve of the GPT"),
        ("steps", 1600, "of each curve of the GPT"),
        ("image-steps", 200, "of each curve of the ResNet"),
        ("microbatches", 4, "of a step"),
        ("jobs", 2, "curves at a time"),
        ("rounds", 5, "runs of each way that is timed"),
        ("settle", 10, "steps that do not count for the time"),
        ("timed", 30, "steps that do"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument(
        "--journal",
        type=Path,
        default=Path("stale.journal"),
        help="where to note curves that are done (default: ./stale.journal)",
    )
    options = parser.parse_args()
    found = curves(options)
    with tempfile.TemporaryDirectory(prefix="hetpeer-stale-") as folder:
        seconds = asyncio.run(times(options, Path(folder)))
    figures = {"curves": found, "times": seconds, **judge(found, seconds)}
    figures["met"] = all(figures["goals"].values())
    return report.finish("stale", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
