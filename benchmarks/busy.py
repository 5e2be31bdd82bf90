"""How much of its time each peer of an uneven pipeline computes: steps one after the other (1F1B), and steps that overlap.

Three volunteers whose workers are held to speeds of 1 : 2 : 3 by SIGSTOP and SIGCONT, as a limit on the processor does, with blocks cut so that a
microbatch takes all of them as long; what is left of a difference after some steps the speeds make up for. A worker that never waits computes all the time: that is what it would do alone on its part. Of that, the
share in which a forward, a backward or an update is at work, from the volunteers' traces; ways take turns, the middle of several runs.

    python -m benchmarks.busy
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.swarm import ENDLESS, NEVER, Model, Swarm, make_run, recut, running
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.bootstrap.settings import TrainingSettings
from hetpeer.peer.watching.perfetto import perfetto

SPEEDS = (1, 2, 3)
FASTEST = 0.55
"""Share of a core that the fastest worker has: together they leave room for the daemons on two."""
PERIOD_S = 0.05
LOOKED_AT = 3
"""Steps after which everybody's log says which blocks are its own."""
GOAL = 0.95
WITHIN_S = 600.0
WORK = ("Forward", "Backward", "Apply")
MODEL = Model(width=256, layers=12, heads=4, sequence_length=128)
"""Two, four and six layers: as uneven as the speeds, or who has less to do than it could would wait for the others whatever the schedule."""

Layout = tuple[tuple[int, int], ...]


@contextmanager
def held_to(shares: Mapping[int, float]) -> Iterator[None]:
    """Processes (by pid) run for so much of each period, as `shares` says by then, and stand still for the rest."""
    over = threading.Event()

    def hold(pid: int) -> None:
        with suppress(ProcessLookupError):
            while not over.wait(PERIOD_S * shares[pid]):
                os.kill(pid, signal.SIGSTOP)
                over.wait(PERIOD_S * (1.0 - shares[pid]))
                os.kill(pid, signal.SIGCONT)

    threads = [threading.Thread(target=hold, args=(pid,)) for pid in shares]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


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
        shares = {worker.pid: FASTEST * SPEEDS[stage] / SPEEDS[-1] for worker, stage in places}
        with held_to(shares):
            tried = await computed(swarm, folder, places, LOOKED_AT + 1, options.tried)
            for (worker, _), share in zip(places, tried, strict=True):
                shares[worker.pid] *= share / max(tried)
            found = await computed(
                swarm, folder, places, LOOKED_AT + options.tried + options.settle, options.steps
            )
            passed = seconds(swarm, options.steps)
    order = sorted(range(len(places)), key=lambda number: places[number][1])
    return {
        "computes": [round(found[number], 4) for number in order],
        "speeds": [round(shares[places[number][0].pid] / FASTEST * SPEEDS[-1], 2) for number in order],
        "microbatches_per_s": options.steps * options.microbatches / passed,
        "layout": even(made),
    }


async def computed(
    swarm: Swarm, folder: Path, places: Sequence[tuple[psutil.Process, int]], first: int, steps: int
) -> list[float]:
    """Of its time in `steps` steps from step `first` on, that each volunteer computed."""
    await swarm.until(first + steps, WITHIN_S)
    passed, spans = seconds(swarm, steps), computing(folder)
    last = min(max(stop for _, stop in one) for one in spans.values())
    return [within(spans[f"v{number}"], last - passed, last) / passed for number, _ in enumerate(places, 1)]


def seconds(swarm: Swarm, steps: int) -> float:
    """That the last `steps` steps took."""
    ends = [seen.at for seen in swarm.feed.seen if seen.record["kind"] == "commit"]
    return ends[-1] - ends[-1 - steps]


def stages(swarm: Swarm) -> list[tuple[psutil.Process, int]]:
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
            "computes": [
                statistics.median(column) for column in zip(*(r["computes"] for r in runs), strict=True)
            ],
            "microbatches_per_s": statistics.median(r["microbatches_per_s"] for r in runs),
        }
        for staleness, runs in found.items()
    }
    return {
        "speeds": SPEEDS,
        "microbatches": options.microbatches,
        "rounds": options.rounds,
        "ways": ways,
        "runs": found,
        "met": all(min(way["computes"]) >= GOAL for staleness, way in ways.items() if staleness),
    }


def show(figures: dict[str, Any]) -> None:
    plain = figures["ways"].get(0)
    for staleness, way in figures["ways"].items():
        faster = f"  {way['microbatches_per_s'] / plain['microbatches_per_s']:.2f}x" if plain else ""
        shares = ", ".join(f"{share:.1%}" for share in way["computes"])
        title = f"staleness {staleness}" if staleness else "one after the other"
        print(f"{title:20} {way['microbatches_per_s']:6.2f} microbatches/s{faster}  computes {shares}")
    print(f"  goal {GOAL:.0%} of each peer's time: {'met' if figures['met'] else 'MISSED'}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("microbatches", 8, "of a step"),
        ("microbatch-size", 2, "samples"),
        ("tried", 4, "steps after which speeds are put right"),
        ("settle", 3, "steps that do not count after that"),
        ("steps", 12, "steps that do"),
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
