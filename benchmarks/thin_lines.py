"""Swarms of real processes on lines of 2 to 5 Mbit/s up: what each link sends, and what is learned with it.

Four stages of a GPT in the laboratory (root), 40 ms there and back. Each way trains the same batches: `auto`
(`--codec auto`: each link as far as it pays), `auto, warm-up` (its largest ratio rises from 4 in the first
half of the steps), and `uniform` Top-K at the author's ratio. Without a codec a step would take minutes; what
it learns is what one machine learns, bit for bit but for the order of sums (benchmarks.models), so it is
computed on one. A busy machine computes more slowly, and the links of `auto` aim at that: their `why` has
the time that they aimed at.

    python -m benchmarks.thin_lines
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.swarm import NEVER, Model, Site, make_run, running
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.run.settings import LinkSettings, TrainingSettings
from tests.reference.reference_run import run_reference
from tests.wanlab.lab import Lab

UPLINKS = (5.0, 2.0, 3.0, 4.0)
"""Mbit/s of the four stages, in the order in which they come."""
NETWORK = {"nodes": 5, "latency_ms": 20, "uplink_mbps": [0, *UPLINKS], "queue_ms": 1000}
RATIO = 100.0
LIMIT = "topk-int4"
WITHIN_S = 1500.0
DROPS = 7.6
"""Times fewer bytes than which no rounding reaches: 7.5, and what zstd takes away."""


def ways(steps: int) -> Mapping[str, LinkSettings | None]:
    """Name → links; None: without a codec, on one machine."""
    return {
        "none": None,
        "auto": LinkSettings(codec=LIMIT, ratio=RATIO),
        "auto, warm-up": LinkSettings(codec=LIMIT, ratio=RATIO, ratio_warmup=steps // 2),
        "uniform": LinkSettings(codec=LIMIT, ratio=RATIO, adaptive=False),
    }


async def swarm_of(run: Any, folder: Path) -> dict[str, Any]:
    """The run in the laboratory, to its end."""
    rows: list[dict[str, Any]] = []
    steps = run.manifest.training.steps
    with Lab(NETWORK) as lab:
        async with running(run, folder, len(UPLINKS), site=Site(lab=lab)) as swarm:
            await swarm.until(steps - 1, WITHIN_S)
            async with swarm.asking("status", "--json") as asked:
                rows = json.loads(await asked.next_line(WITHIN_S))["peers"]
            await swarm.finished(list(swarm.volunteers), WITHIN_S)
            swarm.feed.poll()
            commits = [one.record for one in swarm.feed.seen if one.record["kind"] == "commit"]
            evaluations = swarm.feed.history.evaluations
        sent = sum(sum(row[1:]) for row in lab.stats()["pair_bytes"][1:])
    assert audit(run.path).ok
    names = {row["peer"][-8:]: row["name"] for row in rows}
    links = [
        {
            "link": f"{row['name']} → {names.get(one['to'], one['to'])}",
            "mbit_s": round(one["bytes_per_second"] * 8e-6, 2),
            "ratio": one["ratio"],
            "why": one["why"],
        }
        for row in sorted(rows, key=lambda row: row["name"])
        for one in row["links"]
    ]
    return {
        "evaluations": {str(step): loss for step, loss in evaluations.items()},
        "bytes_a_step": round(sent / steps),
        "step_s": [round(one["seconds"], 1) for one in commits],
        "links": links,
    }


def one_way(links: LinkSettings | None, options: Any) -> dict[str, Any]:
    training = TrainingSettings(
        steps=options.steps,
        batch_size=options.microbatches * options.samples,
        microbatch_size=options.samples,
        learning_rate=1e-3,
        eval_every=options.steps,
        eval_microbatches=4,
        checkpoint_every=NEVER,
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hetpeer-thin-") as path:
        model = Model(width=options.width, layers=len(UPLINKS), sequence_length=128)
        run = make_run(Path(path), model, len(UPLINKS), training, options.seed, links)
        if links is None:
            found: dict[str, Any] = {
                "evaluations": run_reference(run.path, options.steps).records["evaluations"]
            }
        else:
            found = asyncio.run(swarm_of(run, Path(path)))
            found["median_s"] = statistics.median(found["step_s"][options.steps // 2 :])
    found["whole_s"] = round(time.monotonic() - began)
    found["loss"] = found["evaluations"][str(options.steps)]
    return found


def show(figures: dict[str, Any]) -> None:
    for name, way in figures["ways"].items():
        sent = f", {way['bytes_a_step'] / 1e6:.2f} MB a step" if "bytes_a_step" in way else ""
        took = f", {way['median_s']:.1f} s a step" if "median_s" in way else ""
        print(f"{name:14} held-out loss {way['loss']:.4f}{sent}{took}")
        for link in way.get("links", ()):
            print(f"    {link['link']}: {link['mbit_s']} Mbit/s, {link['ratio']:.1f} times, {link['why']}")
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("width", 128, "of the GPT"),
        ("samples", 16, "of a microbatch"),
        ("microbatches", 8, "of a step"),
        ("steps", 40, "of each way"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument("--only", nargs="*", help="ways")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {
        name: links for name, links in ways(options.steps).items() if not options.only or name in options.only
    }
    found: dict[str, Any] = {}
    for name, links in chosen.items():
        found[name] = one_way(links, options)
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    ratios = [link["ratio"] for link in found.get("auto", {}).get("links", ())]
    losses = {name: way["loss"] for name, way in found.items()}
    goals = {
        "links of auto leave elements out": bool(ratios) and max(ratios) > DROPS,
        "links of auto have ratios of their own": bool(ratios) and max(ratios) > 1.2 * min(ratios),
        "auto learns more than uniform from the same tokens": losses.get("auto", 9.0)
        < losses.get("uniform", 9.9),
    }
    figures = {"options": vars(options), "ways": found, "goals": goals, "met": all(goals.values())}
    return report.finish("thin-lines", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
