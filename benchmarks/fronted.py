"""Cost of a reliable peer in front of volunteers that cannot reach each other, when it carries
their streams.

The same swarm of four stages in homes (root), twice: volunteers send to each other (`direct`), and with every
way between two volunteers cut (`fronted`). The reliable peer assigns and routes in both. A step's time is
that of the middle one.

    python -m benchmarks.fronted
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.networks import network
from benchmarks.swarm import NEVER, Model, Site, make_run, running
from hetpeer.bootstrap.run.settings import LinkSettings, TrainingSettings
from tests.wanlab.lab import Lab

PEERS = 4
WITHIN_S, LOOK_S = 600.0, 10.0


async def train(options: Any, folder: Path, codec: str, *, fronted: bool) -> dict[str, Any]:
    """One of the two; the run ends by itself."""
    training = TrainingSettings(
        steps=options.settle + options.steps,
        batch_size=options.microbatches * 4,
        microbatch_size=4,
        eval_every=NEVER,
        checkpoint_every=NEVER,
        slot_size=4,
    )
    links = LinkSettings(codec=codec, ratio=100.0 if codec != "none" else 1.0)
    with Lab(network("homes")) as lab:
        if fronted:
            for one, other in combinations(range(1, PEERS + 1), 2):
                lab.order(f"cut {one} {other}")
        run = make_run(folder, Model(width=options.width), PEERS, training, options.seed, links)
        async with running(run, folder, PEERS, site=Site(lab=lab)) as swarm:
            await swarm.until(options.settle, WITHIN_S)
            async with swarm.asking("status", "--json") as asked:
                status = json.loads(await asked.next_line(WITHIN_S))
            await swarm.finished(list(swarm.volunteers), WITHIN_S)
            swarm.feed.poll()
            commits = [seen.record for seen in swarm.feed.seen if seen.record["kind"] == "commit"]
    links = [link["path"] for peer in status["peers"] for link in peer["links"]]
    paths = sorted({path.split()[0] for path in links if path})  # empty: its end has not looked yet
    seconds = [round(commit["seconds"], 2) for commit in commits[options.settle :]]
    return {"step_s": seconds, "median_s": statistics.median(seconds), "paths": paths}


async def measure(options: Any, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for codec in ("none", "topk-int4"):
        for way in ("direct", "fronted"):
            place = folder / f"{codec}-{way}"
            place.mkdir()
            found[f"{way}, {codec}"] = await train(options, place, codec, fronted=way == "fronted")
    slower = {
        codec: round(found[f"fronted, {codec}"]["median_s"] / found[f"direct, {codec}"]["median_s"], 2)
        for codec in ("none", "topk-int4")
    }
    return {"ways": found, "fronted_takes": slower}


def show(figures: dict[str, Any]) -> None:
    for way, one in figures["ways"].items():
        print(f"{way:20} {one['median_s']:6.2f} s a step, by {', '.join(one['paths'])}")
    print(f"through the reliable peer a step takes so many times as long: {figures['fronted_takes']}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("width", 128, "of the model"),
        ("microbatches", 16, "of a step, of 4 samples"),
        ("settle", 2, "steps that do not count"),
        ("steps", 5, "that count"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-benchmark-") as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    return report.finish("fronted", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
