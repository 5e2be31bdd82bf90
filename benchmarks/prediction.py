"""Whether `hetpeer plan` is right: predicted and measured time of a step, in the laboratory's networks.

Two predictions: that of the swarm as it runs (`hetpeer plan`), and what the planner says of the same
volunteers in the same places (`hetpeer plan --devices`, what decides who is moved): `hetpeer status
--devices` writes them down, and the layout that they have is priced. The planner's is of steps one after the
other. Both are judged in all three networks.

As many stages as volunteers. When the windows are settled and the lines measured, the commands look at the
swarm for some steps: the middle one of their answers stands beside the middle one of the steps; of steps that
overlap (`--staleness`) beside their mean, as their ends come now closer together and now farther apart.

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
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.networks import VOLUNTEERS, network
from benchmarks.swarm import ENDLESS, NEVER, Model, Site, Swarm, make_run, running
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import LinkSettings, TrainingSettings
from hetpeer.peer.planning.device_files import devices_in
from hetpeer.peer.planning.model_workload import work_of
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts
from hetpeer.stages.planning.swarms.swarm_plan import planned
from tests.wanlab.lab import Lab

WITHIN_S = 400.0
GOAL = 0.2
WAYS = {"none": LinkSettings(), "AdaTopK": LinkSettings(codec="topk-int8", ratio=100.0)}
WHERE = ("homes", "city", "regions")
FIGURES = {"off": "hetpeer plan", "planner_off": "hetpeer plan --devices"}


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
    predictions: list[dict[str, Any]] = []
    inventories: list[dict[str, Any]] = []
    with Lab(network(where, volunteers)) as lab:
        async with running(run, folder, volunteers, site=Site(lab=lab)) as swarm:
            await swarm.until(options.settle, WITHIN_S)
            async with (
                swarm.asking("plan", "--watch", "--json") as predicting,
                swarm.asking("status", "--devices", "--watch", "--json") as writing,
            ):

                async def look() -> None:
                    """Both of the same steps: what a worker takes differs from one to the next."""
                    predictions.append(json.loads(await predicting.next_line(WITHIN_S)))
                    inventories.append(json.loads(await writing.next_line(WITHIN_S)))

                await look()
                begin = len(step_seconds(swarm)) + 1  # after the one that is under way
                while len(step_seconds(swarm)) < begin + options.steps:
                    await look()
            steps = step_seconds(swarm)[begin:]
    predicted = statistics.median(found["predicted_s"] for found in predictions)
    measured = statistics.fmean(steps) if options.staleness else statistics.median(steps)
    judged = [] if options.staleness else inventories
    members = predictions[-1]["members"]
    prices = [
        priced(run, devices, members) for devices in judged if names(members) <= names(devices["device"])
    ]
    assert 2 * len(prices) >= len(judged), "most looks at the DHT see nobody missing"
    planned_s = statistics.median(prices) if prices else None
    return {
        "volunteers": volunteers,
        "where": where,
        "way": way,
        "predicted_s": predicted,
        "planned_s": planned_s,
        "measured_s": measured,
        "off": predicted / measured - 1,
        "planner_off": None if planned_s is None else planned_s / measured - 1,
        "predictions_s": [round(found["predicted_s"], 3) for found in predictions],
        "steps_s": [round(one, 3) for one in steps],
        "last": predictions[-1],
        "planned_each_s": [round(one, 3) for one in prices],
        "devices": inventories[-1],
    }


def names(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    return {entry["name"] for entry in entries}


def priced(run: RunDirectory, document: Any, members: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of a step by the planner's cost model, of the devices in `document` with the blocks that
    `members` have: one pipeline.
    """
    named = devices_in(document, "status --devices")
    work = named.of(work_of(str(run.path), None))
    order = tuple(named.names.index(member["name"]) for member in members)
    cuts = (0, *(member["blocks"][1] for member in members))
    pipeline = PipelineCuts(named.devices, work).at(order, cuts)
    assert pipeline is not None, f"by the planner {cuts} does not fit into {named.names}"
    return planned(named.devices, work, [pipeline]).total_s


def step_seconds(swarm: Swarm) -> list[float]:
    """From one commit to the next."""
    swarm.feed.poll()
    return [seen.record["seconds"] for seen in swarm.feed.seen if seen.record["kind"] == "commit"]


def judge(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Figure, network → whether it was near enough in all of its runs."""
    return {
        f"{title} within {GOAL:.0%} in {where}": all(abs(one[figure]) <= GOAL for one in those)
        for figure, title in FIGURES.items()
        for where in WHERE
        if (those := [row for row in rows if row["where"] == where and row[figure] is not None])
    }


def told(row: Mapping[str, Any]) -> str:
    """A line."""
    predicted, measured = f"{row['predicted_s']:7.2f} s", f"{row['measured_s']:7.2f} s"
    line = (
        f"{row['volunteers']} in {row['where']:8} {row['way']:8} measured {measured}  "
        f"predicted {predicted}, off by {row['off']:+.0%}"
    )
    if row["planned_s"] is None:
        return line
    return f"{line}  by the planner {row['planned_s']:7.2f} s, off by {row['planner_off']:+.0%}"


def name_of(options: Any) -> str:
    """Name of the result file."""
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
    goals: dict[str, bool] = {}
    for volunteers, where, way in product(options.volunteers, WHERE, WAYS):
        if options.only not in where:
            continue
        with tempfile.TemporaryDirectory(prefix="hetpeer-benchmark-") as folder:
            rows.append(asyncio.run(measure(volunteers, where, way, options, Path(folder))))
        if not options.json:
            print(told(rows[-1]), flush=True)
        goals = judge(rows)
        figures = {
            "goal": GOAL,
            "staleness": options.staleness,
            "rows": rows,
            "goals": goals,
            "met": all(goals.values()),
        }
        document = report.keep(name_of(options), figures, seed=options.seed)
    if options.json:
        print(json.dumps(document))
    else:
        report.show_goals(goals)
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
