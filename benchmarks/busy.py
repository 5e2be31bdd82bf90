"""How much of its time each peer of an uneven pipeline computes: steps one after the other (1F1B), and
steps that overlap.

Three volunteers whose workers have processors as fast as 1 : 2 : 3 (tests/wanlab/processors.py, root), with
blocks cut so that a microbatch takes all of them as long. What else their machines do, and the coordinator,
has the rest of this one. What is left of a difference the speeds make up for, by a tenth at most (more is a
goal missed): each is put right by the processor time that a microbatch takes its worker, which waiting for
another does not change. Two figures for each peer:

* the share of its time in which a forward, a backward or an update is at work, from the volunteers' traces
  (that of a worker that never waits is all of it);
* microbatches a second, over those that the same blocks do under the same limit when they wait for nobody
  (baselines/part.py), the three of them side by side.

Ways take turns, the middle of several runs.

    python -m benchmarks.busy
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.endtoend_ways import script
from benchmarks.swarm import ENDLESS, NEVER, Model, Swarm, make_run, recut, running
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.peer.process.hetpeer_children import Child, end_all
from hetpeer.peer.watching.perfetto import perfetto
from tests.wanlab.processors import Processor

SPEEDS = (1, 2, 3)
CORES = 0.9
"""Share of a core that all workers have together: it leaves room for the daemons on two."""
LOOKED_AT = 3
"""Steps after which everybody's log says which blocks are its own."""
GOAL, ASKEW = 0.95, 0.10
"""Goal as a share of what each would do alone; error of a speed at most."""
WITHIN_S = 600.0
WORK = ("Forward", "Backward", "Apply")
MODEL = Model(width=256, layers=12, heads=4, sequence_length=128)
"""Two, four and six layers: as uneven as the speeds, or who has less to do than it could would wait for
the others whatever the schedule.
"""

Layout = tuple[tuple[int, int], ...]
Places = Sequence[tuple[psutil.Process, int]]
"""Each volunteer's worker and its stage, in the volunteers' order."""


@contextmanager
def held_to(shares: Mapping[int, float]) -> Iterator[Callable[[], None]]:
    """Processes (by pid) have so much of a processor; what is yielded says that `shares` has changed."""
    with ExitStack() as stack:
        held = {pid: stack.enter_context(Processor(pid, share)) for pid, share in shares.items()}

        def hold() -> None:
            for pid, processor in held.items():
                processor.hold(shares[pid])

        yield hold


def even(run: RunDirectory) -> Layout:
    """The cut at which the slowest of the three is soonest done with a microbatch."""
    flops = [block.flops_forward for block in run.manifest.blocks]
    cuts = itertools.combinations(range(1, len(flops)), len(SPEEDS) - 1)
    layouts = [tuple(itertools.pairwise((0, *cut, len(flops)))) for cut in cuts]

    def longest(layout: Layout) -> float:
        pairs = zip(layout, SPEEDS, strict=True)
        return max(sum(flops[begin:end]) / speed for (begin, end), speed in pairs)

    return min(layouts, key=longest)


def within(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds between `begin` and `end` that are in a span. A lane's spans do not overlap."""
    return sum(max(min(stop, end) - max(start, begin), 0.0) for start, stop in spans)


def computing(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Volunteer → when it computed, in seconds by one clock."""
    events = perfetto(folder)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] == "compute" and event["name"].split()[0] in WORK:
            began = event["ts"] / 1e6
            found.setdefault(names[event["pid"]], []).append((began, began + event["dur"] / 1e6))
    return found


async def trained(folder: Path, options: Any, staleness: int) -> dict[str, Any]:
    """One run: shares by stage, and microbatches a second."""
    training = TrainingSettings(
        steps=ENDLESS,
        batch_size=options.microbatches * options.microbatch_size,
        microbatch_size=options.microbatch_size,
        slot_size=min(4, options.microbatches),
        eval_every=NEVER,
        eval_microbatches=1,
        checkpoint_every=NEVER,
        staleness=staleness,
    )
    made = make_run(folder, MODEL, len(SPEEDS), training, options.seed)
    run = recut(made, even(made))
    async with running(run, folder, len(SPEEDS), "--trace") as swarm:
        await swarm.until(LOOKED_AT, WITHIN_S)
        places = stages(swarm)
        shares = {worker.pid: CORES * SPEEDS[stage] / sum(SPEEDS) for worker, stage in places}
        with held_to(shares) as hold:
            first = LOOKED_AT + 1
            spent = await processor_time(swarm, places, first, options.tried)
            shares.update({pid: CORES * each / sum(spent.values()) for pid, each in spent.items()})
            hold()
            first += options.tried + options.settle
            found = await computed(swarm, folder, places, first, options.steps)
            passed = seconds(swarm, options.steps)
    order = sorted(range(len(places)), key=lambda number: places[number][1])
    given = [shares[places[number][0].pid] for number in order]
    alone_s = await alone(run, folder, given, options)
    rate = options.steps * options.microbatches / passed
    speeds = [share / CORES * sum(SPEEDS) for share in given]
    return {
        "computes": [round(found[number], 4) for number in order],
        "of_alone": [round(rate * each, 4) for each in alone_s],
        "alone_s": [round(each, 4) for each in alone_s],
        "speeds": [round(speed, 3) for speed in speeds],
        "askew": max(abs(speed / wanted - 1) for speed, wanted in zip(speeds, SPEEDS, strict=True)),
        "microbatches_per_s": rate,
        "layout": even(made),
    }


async def alone(run: RunDirectory, folder: Path, shares: Sequence[float], options: Any) -> list[float]:
    """Seconds of a microbatch at each stage, if it never waits for another and is held to so much of its
    time.
    """
    children = []
    try:
        for stage, (begin, end) in enumerate(even(run)):
            children.append(await script("part", folder, [str(run.path), str(begin), str(end)], number=stage))
        for child in children:
            await child.next_line(WITHIN_S)
        with held_to({child.pid: share for child, share in zip(children, shares, strict=True)}):
            return await asyncio.gather(*(pace(child, options.alone) for child in children))
    finally:
        await end_all(children)


async def pace(child: Child, microbatches: int) -> float:
    """Seconds of one of its microbatches, the mean of so many."""
    began = json.loads(await child.next_line(WITHIN_S))["at"]
    for _ in range(microbatches - 1):
        await child.next_line(WITHIN_S)
    ended = json.loads(await child.next_line(WITHIN_S))["at"]
    return float(ended - began) / microbatches


async def processor_time(swarm: Swarm, places: Places, first: int, steps: int) -> dict[int, float]:
    """Worker (by pid) → seconds of a processor that `steps` steps from step `first` on took it."""

    def used() -> dict[int, float]:
        return {worker.pid: sum(worker.cpu_times()[:2]) for worker, _ in places}

    await swarm.until(first, WITHIN_S)
    before = used()
    await swarm.until(first + steps, WITHIN_S)
    return {pid: after - before[pid] for pid, after in used().items()}


async def computed(swarm: Swarm, folder: Path, places: Places, first: int, steps: int) -> list[float]:
    """Share of its time in `steps` steps from step `first` on that each volunteer computed."""
    await swarm.until(first + steps, WITHIN_S)
    passed, spans = seconds(swarm, steps), computing(folder)
    last = min(max(stop for _, stop in one) for one in spans.values())
    return [within(spans[f"v{number}"], last - passed, last) / passed for number, _ in enumerate(places, 1)]


def seconds(swarm: Swarm, steps: int) -> float:
    """Seconds that the last `steps` steps took."""
    ends = [seen.at for seen in swarm.feed.seen if seen.record["kind"] == "commit"]
    return ends[-1] - ends[-1 - steps]


def stages(swarm: Swarm) -> Places:
    """Each volunteer's worker and its stage, in the volunteers' order."""
    order = sorted(swarm.run.manifest.layouts[0])
    workers = [swarm.worker(number) for number in sorted(swarm.volunteers)]
    return [(worker, order.index(swarm.stage_of(worker))) for worker in workers if worker is not None]


async def measure(options: Any, folder: Path) -> dict[str, Any]:
    found: dict[int, list[dict[str, Any]]] = {staleness: [] for staleness in options.staleness}
    for turn in range(options.rounds):
        for staleness in options.staleness:
            place = folder / f"{turn}-{staleness}"
            place.mkdir()
            found[staleness].append(await trained(place, options, staleness))
            print(f"staleness {staleness}: {found[staleness][-1]}", file=sys.stderr, flush=True)
    ways = {
        staleness: {
            "computes": middles(runs, "computes"),
            "of_alone": middles(runs, "of_alone"),
            "speeds": middles(runs, "speeds"),
            "microbatches_per_s": statistics.median(r["microbatches_per_s"] for r in runs),
        }
        for staleness, runs in found.items()
    }
    overlapping = {f"staleness {staleness}": way for staleness, way in ways.items() if staleness}
    askew = max(run["askew"] for runs in found.values() for run in runs)
    goals = {f"speeds within {ASKEW:.0%} of {':'.join(map(str, SPEEDS))}": askew <= ASKEW}
    for title, way in overlapping.items():
        goals[f"{title}: each computes {GOAL:.0%} of its time"] = min(way["computes"]) >= GOAL
        goals[f"{title}: each does {GOAL:.0%} of what it does alone"] = min(way["of_alone"]) >= GOAL
    return {
        "speeds": SPEEDS,
        "askew": round(askew, 3),
        "microbatches": options.microbatches,
        "rounds": options.rounds,
        "ways": ways,
        "runs": found,
        "goals": goals,
        "met": all(goals.values()),
    }


def middles(runs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Stage by stage, the middle of the runs."""
    return [statistics.median(column) for column in zip(*(run[name] for run in runs), strict=True)]


def show(figures: dict[str, Any]) -> None:
    plain = figures["ways"].get(0)
    for staleness, way in figures["ways"].items():
        faster = f"  {way['microbatches_per_s'] / plain['microbatches_per_s']:.2f}x" if plain else ""
        title = f"staleness {staleness}" if staleness else "one after the other"
        print(f"{title:20} {way['microbatches_per_s']:6.2f} microbatches/s{faster}")
        for name, key in (("computes", "computes"), ("of what it does alone", "of_alone")):
            print(f"  {name:22} " + ", ".join(f"{share:.1%}" for share in way[key]))
        print(f"  {'speeds':22} " + " : ".join(f"{speed:.2f}" for speed in way["speeds"]))
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("microbatches", 8, "of a step"),
        ("microbatch-size", 4, "samples"),
        ("tried", 4, "steps by which speeds are put right"),
        ("settle", 2, "steps that do not count after that"),
        ("steps", 12, "steps that do"),
        ("alone", 48, "microbatches of each part alone"),
        ("rounds", 5, "runs of each way"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument(
        "--staleness", type=int, nargs="+", default=[0, 1, 2], help="the ways (default: 0 1 2)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-busy-") as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    return report.finish("busy", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
