"""Gain and cost of AdaTopK: four stages in four regions of the world, ratio 100 in the manifest.

Three ways to send: as it is (`none`), every link as far as it helps (AdaTopK), every link a hundred times
smaller (uniform Top-K). Time is that of a step of many microbatches. What is lost is seen on a GPT's held-out
loss after the same tokens, over seeds, and on the accuracy of a ResNet over the whole set of digits by
cross-validation; models are evaluated as they are exported. What `none` learns is what one machine learns,
bit for bit but for the order of sums (benchmarks.models), so it is computed on one. In the laboratory (root).

    python -m benchmarks.adaptive --jobs 2
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks import report
from benchmarks.networks import network
from benchmarks.swarm import NEVER, Site, running
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.results.export import export
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import LinkSettings, TrainingSettings
from hetpeer.examples.digits import data as digits
from hetpeer.examples.resnet import ResNet
from tests.reference.reference_run import run_reference
from tests.wanlab.lab import Lab

RATIO = 100.0
LINKS = {
    "none": LinkSettings(),
    "AdaTopK": LinkSettings(codec="topk-int4", ratio=RATIO),
    "uniform": LinkSettings(codec="topk-int4", ratio=RATIO, adaptive=False),
}
VOLUNTEERS, FOLDS, ZOOM = 4, 5, 4
WITHIN_S = 1500.0
FASTER, WORSE = 3.0, 0.02
"""Goals: AdaTopK's step against `none`, and what its loss or accuracy may be worse by."""
GPT = "from hetpeer.examples.gpt import GPT\n\n\ndef build():\n    return GPT(64, 4, 4, 128, 256)\n"
RESNET = "from hetpeer.examples.resnet import ResNet\n\n\ndef build():\n    return ResNet(16, 4)\n"
FOLD = """
import numpy as np
from hetpeer.examples.digits import data as digits

def data():
    for number, sample in enumerate(digits()):
        if number % {folds} != {fold}:
            yield sample | {{"image": np.kron(sample["image"], np.ones((1, {zoom}, {zoom}), np.float32))}}
"""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to train; `samples` are those of a microbatch.

    Images have four times the sides of scikit-learn's.
    """

    name: str
    model: str
    samples: int
    learning_rate: float
    images: bool

    def make(
        self, folder: Path, links: LinkSettings, microbatches: int, steps: int, seed: int
    ) -> RunDirectory:
        """A run directory; `seed` is the fold that is left out of images."""
        (folder / "model.py").write_text(self.model)
        (folder / "data.py").write_text(FOLD.format(folds=FOLDS, fold=seed % FOLDS, zoom=ZOOM))
        training = TrainingSettings(
            steps=steps,
            batch_size=microbatches * self.samples,
            microbatch_size=self.samples,
            learning_rate=self.learning_rate,
            eval_every=NEVER,
            eval_microbatches=2 if self.images else 8,
            checkpoint_every=NEVER,
        )
        return create_run(
            folder / "run",
            model=f"{folder}/model.py:build",
            data=[f"{folder}/data.py:data"] if self.images else [],
            name="adaptive",
            seed=seed,
            sequence_length=128,
            stages=[VOLUNTEERS],
            training=training,
            links=links,
        )


SUBJECTS = (
    Subject("GPT", GPT, 32, 1e-3, images=False),
    Subject("ResNet on digits", RESNET, 16, 2e-3, images=True),
)


async def train(run: RunDirectory, folder: Path) -> dict[str, Any]:
    """The run in the four regions, to its end: seconds of its steps and what became of its bytes."""
    began = time.monotonic()
    with Lab(network("regions")) as lab:
        async with running(run, folder, VOLUNTEERS, site=Site(lab=lab)) as swarm:
            await swarm.finished(list(swarm.volunteers), WITHIN_S)
            swarm.feed.poll()
            seconds = [s.record["seconds"] for s in swarm.feed.seen if s.record["kind"] == "commit"]
            evaluations = swarm.feed.history.evaluations
        stats = lab.stats()
    sent = sum(sum(row[1:]) for row in stats["pair_bytes"][1:])
    assert audit(run.path).ok
    return {
        "step_s": [round(one, 2) for one in seconds],
        "loss": evaluations[len(seconds)],
        "bytes_a_step": round(sent / len(seconds)),
        "router_late_us": stats["late_us"],
        "whole_s": round(time.monotonic() - began),
    }


async def timed(subject: Subject, mode: str, options: Any) -> dict[str, Any]:
    """Seconds of a step of many microbatches: the median of the last ones."""
    settle = 1 if mode == "none" else options.settle
    with tempfile.TemporaryDirectory(prefix="hetpeer-adaptive-") as path:
        run = subject.make(
            Path(path), LINKS[mode], options.microbatches, settle + options.timed, options.seed
        )
        found = await train(run, Path(path))
    return found | {"median_s": statistics.median(found["step_s"][settle:])}


async def learned(subject: Subject, mode: str, seed: int, options: Any) -> dict[str, Any]:
    """Held-out loss, or right answers on the fold, after the same data."""
    with tempfile.TemporaryDirectory(prefix="hetpeer-adaptive-") as path:
        folder = Path(path)
        run = subject.make(folder, LINKS[mode], options.few, options.steps, seed)
        if mode == "none":
            reference = await asyncio.to_thread(run_reference, run.path, options.steps)
            found = {"loss": reference.records["evaluations"][str(options.steps)]}
            weights = {
                name: torch.from_numpy(array) for name, array in reference.state.items() if ":" not in name
            }
        else:
            found = await train(run, folder)
            weights = load_file(export(run.path, folder / "weights.safetensors").weights)
        right = correct(weights, seed % FOLDS) if subject.images else None
    return found | {"seed": seed, "right": right}


def correct(weights: dict[str, torch.Tensor], fold: int) -> int:
    """Digits of the fold that the exported model tells right."""
    model = ResNet(16, 4).eval()
    model.load_state_dict(weights, strict=False)
    samples = [sample for number, sample in enumerate(digits()) if number % FOLDS == fold]
    images = torch.stack([torch.from_numpy(sample["image"]) for sample in samples])
    images = images.repeat_interleave(ZOOM, 2).repeat_interleave(ZOOM, 3)
    with torch.no_grad():
        answers = model(images).argmax(1)
    return int(
        sum(int(answer) == int(sample["label"]) for answer, sample in zip(answers, samples, strict=True))
    )


async def study(subject: Subject, options: Any) -> dict[str, Any]:
    """All of one subject: times one after the other, lessons `jobs` at a time."""
    times = {mode: await timed(subject, mode, options) for mode in LINKS}
    jobs = asyncio.Semaphore(options.jobs)

    async def one(mode: str, seed: int) -> dict[str, Any]:
        async with jobs:
            return await learned(subject, mode, seed, options)

    lessons = {}
    for mode in LINKS:
        count = options.uniform_seeds if mode == "uniform" else options.seeds
        seeds = range(options.seed, options.seed + count)
        lessons[mode] = await asyncio.gather(*(one(mode, seed) for seed in seeds))
    return judge(subject, times, lessons)


def judge(
    subject: Subject, times: dict[str, Any], lessons: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for mode, found in lessons.items():
        loss, error = mean_and_error([one["loss"] for one in found])
        rows[mode] = {
            "step_s": times[mode]["median_s"],
            "faster": times["none"]["median_s"] / times[mode]["median_s"],
            "fewer_bytes": times["none"]["bytes_a_step"] / times[mode]["bytes_a_step"],
            "loss": loss,
            "loss_error": error,
        }
        if subject.images:
            share = [one["right"] / len(range(one["seed"] % FOLDS, 1797, FOLDS)) for one in found]
            rows[mode]["accuracy"], rows[mode]["accuracy_error"] = mean_and_error(share)
    ours, plain = rows["AdaTopK"], rows["none"]
    key = "accuracy" if subject.images else "loss"
    worse = (plain[key] - ours[key] if subject.images else ours[key] - plain[key]) / plain[key]
    return {
        "subject": subject.name,
        "ratio": RATIO,
        "rows": rows,
        "worse": worse,
        "met": ours["faster"] >= FASTER and worse <= WORSE,
        "times": times,
        "lessons": lessons,
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error."""
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), spread


def show(result: dict[str, Any]) -> None:
    print(
        f"{result['subject']}: {'way':10} {'s a step':>9} {'faster':>7} {'fewer bytes':>12}  what is learned"
    )
    for mode, row in result["rows"].items():
        learned = f"loss {row['loss']:.4f} ± {row['loss_error']:.4f}"
        if "accuracy" in row:
            learned += f", accuracy {row['accuracy']:.4f} ± {row['accuracy_error']:.4f}"
        print(
            f"  {mode:24} {row['step_s']:9.2f} {row['faster']:6.1f}x {row['fewer_bytes']:11.1f}x  {learned}"
        )
    print(
        f"  AdaTopK is worse by {result['worse']:.2%}; goals {FASTER}x and {WORSE:.0%}: "
        f"{'met' if result['met'] else 'MISSED'}",
        flush=True,
    )


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("microbatches", 64, "of a step that is timed"),
        ("timed", 5, "steps that are timed, after"),
        ("settle", 4, "steps in which links find their ratio"),
        ("few", 8, "microbatches of a step where learning is looked at"),
        ("steps", 40, "of learning"),
        ("seeds", 5, "of none and AdaTopK; folds of the digits"),
        ("uniform-seeds", 3, "of uniform Top-K"),
        ("jobs", 1, "swarms that learn at a time"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument("--only", default="", help="subjects with this in their name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for subject in SUBJECTS:
        if options.only in subject.name:
            found = asyncio.run(study(subject, options))
            # Each takes most of an hour: what one has shown is not lost with the other.
            results.append(
                report.keep(f"adaptive-{subject.name.split()[0].lower()}", found, seed=options.seed)
            )
            if not options.json:
                show(found)
    if options.json:
        print(json.dumps(results))
    return 0 if all(one["met"] for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
