"""Whether `hetpeer plan` is right: predicted and measured time of a step, in the laboratory's networks.

As many stages as volunteers. When the windows are settled and the lines measured, the command looks at the swarm for some steps: the middle one of
its answers stands beside the middle one of the steps; of steps that overlap (`--staleness`) beside their mean, as their ends come now closer together and now farther apart.

    python -m benchmarks.prediction
    python -m benchmarks.prediction --staleness 1
    python -m benchmarks.prediction --volunteers 5 6
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.networks import VOLUNTEERS, network
from benchmarks.swarm import ENDLESS, NEVER, Model, Site, Swarm, make_run, running
from hetpeer.bootstrap.settings import LinkSettings, TrainingSettings
from tests.wanlab.lab import Lab

WITHIN_S = 400.0
GOAL = 0.2
WAYS = {"none": LinkSettings(), "AdaTopK": LinkSettings(codec="topk-int8", ratio=100.0)}
JUDGED = ("homes", "city")
"""The goal is for these; the regions of the world are shown beside them."""


async def measure(volunteers: int, where: str, way: str, options: Any, folder: Path) -> dict[str, Any]:
    model = Model(width=options.width, layers=volunteers, sequence_length=128)
    training = TrainingSettings(
        steps=ENDLESS,
        batch_size=options.microbatches * options.microbatch_size,
        microbatch_size=options.microbatch_size,
        eval_every=NEVER,
        eval_microbatches=1,
        checkpoint_every=NEVER,
        staleness=options.staleness,
    )
    run = make_run(folder, model, volunteers, training, options.seed, WAYS[way])
    with Lab(network(where, volunteers)) as lab:
        async with running(run, folder, volunteers, site=Site(lab=lab)) as swarm:
            await swarm.until(options.settle, WITHIN_S)
            async with swarm.asking("plan", "--watch", "--json") as child:
                predictions = [json.loads(await child.next_line(WITHIN_S))]
                begin = len(step_seconds(swarm)) + 1  # after the one that is under way
                while len(step_seconds(swarm)) < begin + options.steps:
                    predictions.append(json.loads(await child.next_line(WITHIN_S)))
            steps = step_seconds(swarm)[begin:]
    predicted = statistics.median(found["predicted_s"] for found in predictions)
    measured = statistics.fmean(steps) if options.staleness else statistics.median(steps)
    return {
        "volunteers": volunteers,
        "where": where,
        "way": way,
        "predicted_s": predicted,
        "measured_s": measured,
        "off": predicted / measured - 1,
        "predictions_s": [round(found["predicted_s"], 3) for found in predictions],
        "steps_s": [round(one, 3) for one in steps],
        "last": predictions[-1],
    }


def step_seconds(swarm: Swarm) -> list[float]:
    """From one commit to the next."""
    swarm.feed.poll()
    return [seen.record["seconds"] for seen in swarm.feed.seen if seen.record["kind"] == "commit"]


def name_of(options: Any) -> str:
    """Of the result file."""
    larger = "-larger" if max(options.volunteers) > VOLUNTEERS else ""
    return f"prediction{larger}{'-overlapping' if options.staleness else ''}"


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("width", 128, "of the model, a layer for each volunteer"),
        ("microbatch-size", 8, "samples"),
        ("microbatches", 16, "of a step"),
        ("settle", 6, "steps before the first question"),
        ("steps", 10, "that count"),
        ("staleness", 0, "so many steps begin before the one that they follow is committed"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument(
        "--volunteers", type=int, nargs="+", default=[VOLUNTEERS], help="swarms of so many (default: 4)"
    )
    parser.add_argument("--only", default="", help="networks with this in their name")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {}
    met = False
    for volunteers, where, way in product(options.volunteers, ("homes", "city", "regions"), WAYS):
        if options.only not in where:
            continue
        with tempfile.TemporaryDirectory(prefix="hetpeer-benchmark-") as folder:
            row = asyncio.run(measure(volunteers, where, way, options, Path(folder)))
        rows.append(row)
        if not options.json:
            print(
                f"{volunteers} in {where:8} {way:8} predicted {row['predicted_s']:7.2f} s  measured {row['measured_s']:7.2f} s"
                f"  off by {row['off']:+.0%}",
                flush=True,
            )
        met = all(abs(row["off"]) <= GOAL for row in rows if row["where"] in JUDGED)
        figures = {
            "goal": GOAL,
            "judged": JUDGED,
            "staleness": options.staleness,
            "met": met,
            "rows": rows,
        }
        document = report.keep(name_of(options), figures, seed=options.seed)
    print(json.dumps(document) if options.json else f"  goal {GOAL:.0%}: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
