"""How far a slow link is hidden behind computing: two stages, as long on the line as at work.

In the laboratory (root). A swarm trains on a fast line first, which says how long a microbatch computes; then
the line is made so slow that a bundle takes as long on it, each way. A step that receives, computes and sends
at once takes little more than the larger of both sums (DT-FM, arXiv 2206.01288, 3.5); one that does not takes
both. Computing is summed from the volunteers' traces; the line's time is what plain TCP takes for the payload
on such a line of the laboratory. What the schedule alone would take is its pure cores in virtual time, on
workers and lines like these: there the first microbatch comes and the last one goes without anything to hide
behind. What a step takes beyond that is shown by where the volunteers did not compute.

    python -m benchmarks.overlap
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, two_way_tcp
from benchmarks.links import WAYS, Ends, rated
from benchmarks.swarm import ENDLESS, NEVER, Model, Site, Swarm, make_run, running
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.peer.watching.perfetto import perfetto
from hetpeer.stages.pipeline.routes import Hop
from hetpeer.stages.planning.uplinks import PeerLink
from hetpeer.stages.planning.virtual_swarm import VirtualSwarm, VirtualVolunteer
from tests.wanlab.lab import Lab

WITHIN_S = 300.0
GOAL = 1.10
AT_LEAST_S = 0.2
"""Least seconds of computing, and of the link, for one microbatch."""
LATENCY_MS, QUEUE_MS = 10, 300
ROUNDS, SETTLED = 5, 4
"""Rounds of TCP and virtual steps whose middle counts; virtual steps before them, which do not count."""
WORK = ("Forward", "Backward")

Span = tuple[float, float, str]
"""From and until in seconds by one clock, and one of `WORK`."""
Spans = dict[int, list[Span]]
"""Peer → when it computed what."""


Events = Sequence[Mapping[str, Any]]
"""Those of a trace in Chrome's format."""


def traced(swarm: Swarm, folder: Path) -> Events:
    """The events of all volunteers' traces so far."""
    swarm.check()
    events: Events = perfetto(folder)["traceEvents"]
    return events


def trained(events: Events) -> Spans:
    """Forwards and backwards among the events; evaluations, which have no backward, are none."""
    named = [
        (event, *event["name"].split(maxsplit=1))
        for event in events
        if event["ph"] == "X" and event["cat"] == "compute" and event["name"].split()[0] in WORK
    ]
    back = {(event["pid"], task) for event, kind, task in named if kind == "Backward"}
    found: Spans = {}
    for event, kind, task in named:
        if (event["pid"], task) in back:
            began = event["ts"] / 1e6
            found.setdefault(event["pid"], []).append((began, began + event["dur"] / 1e6, kind))
    return found


def in_steps(spans: Spans, steps: int, first: int, microbatches: int) -> list[list[list[Span]]]:
    """The work of `steps` steps from step `first` on: volunteers in the order of the pipeline → steps."""
    each = 2 * microbatches  # a forward and a backward
    whole = sorted(sorted(one) for one in spans.values())
    return [[one[i * each : (i + 1) * each] for i in range(first, first + steps)] for one in whole]


def busiest(work: Sequence[Sequence[Sequence[Span]]]) -> list[float]:
    """Seconds that the busiest volunteer computed in each step of `in_steps`."""
    return [
        max(sum(end - begin for begin, end, _ in one) for one in step) for step in zip(*work, strict=True)
    ]


def idle(work: Sequence[Sequence[Sequence[Span]]]) -> list[dict[str, float]]:
    """Seconds in which each volunteer of `in_steps` did not compute: medians of the steps after the first.

    `before_first_s`: from its last work of the step before to its first of this one; `between_s`: in all,
    from there to its last.
    """
    found = []
    for one in work:
        pairs = list(itertools.pairwise(one))
        before = [step[0][0] - earlier[-1][1] for earlier, step in pairs]
        between = [step[-1][1] - step[0][0] - sum(end - begin for begin, end, _ in step) for _, step in pairs]
        found.append(
            {
                "before_first_s": round(statistics.median(before), 3),
                "between_s": round(statistics.median(between), 3),
            }
        )
    return found


def on_line(events: Events, steps: int, first: int, microbatches: int) -> dict[str, float]:
    """Seconds that activations of a step were on the line, and that none was from its first to its last.

    Medians of `steps` steps from step `first` on; two that overlap count once.
    """
    spans = sorted(
        (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event["ph"] == "X" and event["cat"] == "from" and _is_activation(event["name"], microbatches)
    )
    taken, idle = list[float](), list[float]()
    for step in range(first, first + steps):
        own = spans[step * microbatches : (step + 1) * microbatches]
        busy, until = 0.0, own[0][0]
        for begin, end in own:
            busy += max(end - max(begin, until), 0.0)
            until = max(until, end)
        taken.append(busy)
        idle.append(until - own[0][0] - busy)
    return {"taken_s": round(statistics.median(taken), 3), "idle_s": round(statistics.median(idle), 3)}


def _is_activation(name: str, microbatches: int) -> bool:
    """Whether a received tensor is an activation of training; later ids are evaluations."""
    kind, number = name.split()[:2]
    return kind == "activation" and int(number) < microbatches


def of_the_schedule(
    work: Sequence[Sequence[Sequence[Span]]], microbatches: int, line: float
) -> tuple[float, dict[str, float]]:
    """Step over the larger sum if the pure cores are all there is, and the work's variation.

    `line`: seconds on it of a step's bundles, each way.
    """
    names = [str(number) for number in range(len(work))]
    route = tuple(Hop(name, number, number + 1) for number, name in enumerate(names))
    machines, varied = {}, {}
    for name, own in zip(names, work, strict=True):
        times = {
            kind: [end - begin for step in own for begin, end, of in step if of == kind] for kind in WORK
        }
        varied[name] = statistics.fmean(
            statistics.pstdev(one) / statistics.fmean(one) for one in times.values()
        )
        forward, backward = (statistics.fmean(times[kind]) for kind in WORK)
        machines[name] = VirtualVolunteer(forward_s=forward, backward_s=backward, varies=varied[name])
    link = PeerLink(rate=microbatches / line, delay_s=LATENCY_MS / 1e3, activation_bytes=1, gradient_bytes=1)
    links = dict.fromkeys(itertools.permutations(names, 2), link)
    swarm = VirtualSwarm(machines, links, dict.fromkeys(range(microbatches), route))
    steps = [swarm.step() for _ in range(SETTLED + ROUNDS)][SETTLED:]
    ratios = [step.seconds / max(*step.computing.values(), line) for step in steps]
    return round(statistics.median(ratios), 3), {name: round(one, 3) for name, one in varied.items()}


def of_tcp(mbps: float, nbytes: int, folder: Path) -> float:
    """The share of a line that plain TCP fills with payload, frames and headers being the rest."""
    folder.mkdir()
    with Lab({"nodes": 2, "queue_ms": QUEUE_MS}) as lab:
        ends = Ends(lab, folder)
        ends.line(mbps, LATENCY_MS)
        return statistics.median(rated(ends, WAYS["tcp"], mbps, nbytes)[0] for _ in range(ROUNDS))


def acknowledging(mbps: float) -> float:
    """The rate of plain TCP in both directions at once, as a share of its rate in one.

    Acknowledgements of the other direction take the rest. A swarm's line carries both directions; the goal
    counts one.
    """
    with Lab({"nodes": 2, "latency_ms": LATENCY_MS, "queue_ms": QUEUE_MS}) as lab:
        for node in (0, 1):
            lab.order(f"uplink {node} {mbps}")
        one, both = (two_way_tcp.share(lab, mbps, both_ways=way) for way in (False, True))
    return both / one


async def measure(options: Any, lab: Lab, folder: Path) -> dict[str, Any]:
    model = Model(width=options.width, layers=options.layers, sequence_length=options.sequence_length)
    training = TrainingSettings(
        steps=ENDLESS,
        batch_size=options.microbatches * options.microbatch_size,
        microbatch_size=options.microbatch_size,
        eval_every=NEVER,
        eval_microbatches=1,
        checkpoint_every=NEVER,
    )
    run = make_run(folder, model, 2, training, options.seed)
    bundle = options.microbatch_size * model.sequence_length * model.width * 4
    async with running(run, folder, 2, "--trace", site=Site(lab=lab)) as swarm:
        await swarm.until(options.warm_up, WITHIN_S)
        last = in_steps(trained(traced(swarm, folder)), 1, options.warm_up - 1, options.microbatches)
        fast = busiest(last)[0]
        work = fast / options.microbatches
        share = of_tcp(bundle / work * 8e-6, bundle, folder / "tcp")
        rate = bundle / work / share
        for node in (1, 2):
            lab.order(f"uplink {node} {rate * 8 / 1e6}")
        swarm.feed.poll()
        begin = swarm.feed.history.version + options.settle
        await swarm.until(begin, WITHIN_S)
        await swarm.until(begin + options.steps, WITHIN_S)
        events = traced(swarm, folder)
        ends = [seen.at for seen in swarm.feed.seen if seen.record["kind"] == "commit"]
    spans = trained(events)
    counted = in_steps(spans, options.steps, begin, options.microbatches)
    before = in_steps(spans, options.steps + 1, begin - 1, options.microbatches)
    steps = [after - before for before, after in zip(ends[begin - 1 :], ends[begin:], strict=False)][
        : options.steps
    ]
    line = options.microbatches * bundle / (rate * share)
    schedule, varied = of_the_schedule(counted, options.microbatches, line)
    return judge(options, steps, busiest(counted), line) | {
        "schedule_alone": schedule,
        "work_varies": varied,
        "idle": idle(before),
        "activations": on_line(events, options.steps, begin, options.microbatches),
        "computing_fast_line_s": fast / options.microbatches,
        "line_mbps": rate * 8 / 1e6,
        "of_which_tcp_fills": share,
        "left_of_it_both_ways": round(acknowledging(rate * 8 / 1e6), 3),
        "bundle_bytes": bundle,
        "latency_ms": LATENCY_MS,
        "router_late_us": lab.stats()["late_us"],
    }


def judge(options: Any, steps: Sequence[float], sums: Sequence[float], line: float) -> dict[str, Any]:
    ratios = [step / max(work, line) for step, work in zip(steps, sums, strict=True)]
    work = statistics.median(sums)
    ratio = statistics.median(ratios)
    return {
        "microbatches": options.microbatches,
        "step_s": [round(step, 3) for step in steps],
        "computing_s": [round(work, 3) for work in sums],
        "line_s": round(line, 3),
        "per_microbatch_s": {"computing": work / options.microbatches, "line": line / options.microbatches},
        "ratio": round(ratio, 3),
        "ratios": [round(one, 3) for one in ratios],
        "both_sums_would_be": round((work + line) / max(work, line), 3),
        "met": ratio <= GOAL and min(work, line) / options.microbatches >= AT_LEAST_S,
    }


def show(figures: dict[str, Any]) -> None:
    each = figures["per_microbatch_s"]
    print(
        f"a microbatch: {each['computing']:.3f} s of computing, {each['line']:.3f} s on the line each way "
        f"({figures['line_mbps']:.1f} Mbit/s)"
    )
    print(
        f"steps of {figures['microbatches']}: {figures['step_s']} s; computing {figures['computing_s']} s, "
        f"line {figures['line_s']} s"
    )
    print(
        f"a step is {figures['ratio']} of the larger sum (both one after the other: "
        f"{figures['both_sums_would_be']}; the schedule alone: {figures['schedule_alone']})"
    )
    for number, one in enumerate(figures["idle"]):
        print(
            f"  stage {number} did not compute for {one['before_first_s']} s before its first microbatch, "
            f"{one['between_s']} s in all until its last"
        )
    line, alone = figures["activations"], figures["line_s"]
    both = alone / figures["left_of_it_both_ways"]
    print(
        f"  activations were on the line for {line['taken_s']} s (by plain TCP {alone} s, or {both:.3f} s if "
        f"it goes both ways), and for {line['idle_s']} s none was"
    )
    print(f"  goal {GOAL}: {'met' if figures['met'] else 'MISSED'}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("width", 256, "of the model"),
        ("layers", 4, "of the model"),
        ("sequence-length", 128, "tokens"),
        ("microbatch-size", 12, "samples"),
        ("microbatches", 32, "of a step"),
        ("warm-up", 2, "steps on the fast line"),
        ("settle", 2, "steps on the slow one that do not count"),
        ("steps", 5, "that count"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    options = parser.parse_args()
    matrix = {"nodes": 3, "latency_ms": LATENCY_MS, "queue_ms": QUEUE_MS}
    with tempfile.TemporaryDirectory(prefix="hetpeer-benchmark-") as folder, Lab(matrix) as lab:
        figures = asyncio.run(measure(options, lab, Path(folder)))
    return report.finish("overlap", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
