"""The group scheduler: does it ever hang or leave somebody apart, how fast does it decide, and what do groups
cost?

Four parts, all in virtual time:

* histories of whole grouped runs with faults (tests/simulation/sim_grouped.py): every batch is in the
  result once;
* random schedules of the real scheduler with stragglers, arrivals and departures
  (tests/simulation/group_schedules.py), with hetpeer's rules and with SDPipe's two;
* one decision for 1,000 workers, on this machine's clock;
* SDPipe's settings (Miao et al., VLDB 2023, section 5): homogeneous, hete-A and hete-B, where a stage
  sleeps 0.2 or 0.6 s before one iteration in ten. Throughput is that of all pipelines, beside no
  synchronisation at all, all-reduce, and AD-PSGD (Lian et al., ICML 2018) at its best: each averages with
  one other at random, which answers at once, whatever it does; every swarm of a row draws the same naps.
  The paper does not say how long a stage computes: 0.1 to 0.5 s are shown;
* the pace of a home's pipelines among stragglers (hete-B of benchmarks/stragglers.py: in one iteration of ten
  a pipeline sleeps for one and a half): an iteration takes 0.3 or 1.8 s and an averaging a twentieth or a
  fifth of that; also with a coordinator that looks at the clock five times a second only.

    make proof-averaging
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks import report
from hetpeer.averaging.groups.group_scheduler import GroupPipelines
from hetpeer.averaging.groups.wait_window import Adaptive, WaitWindow
from hetpeer.dht.base.runtime import dying_with_us
from tests.simulation.group_schedules import RULES, GroupWatch, schedule
from tests.simulation.sdpipe import Artifact, GroupScheduler, Paper
from tests.simulation.sim_grouped import simulate
from tests.simulation.sim_pipelines import PipelineSetting, SimPipelines, names

FAULTS = 20
"""Faults of a history."""
WORKERS, DECISION_S = 1000, 1e-3
SPAN = 10
"""Groups for each pipeline, as is the default."""
ITERATIONS = 120
SLEEPS = {"homogeneous": 0.0, "hete-A": 0.2, "hete-B": 0.6}
SHAPES = ((4, 4), (16, 4))
"""Pipelines and stages."""
STAGE_S = (0.1, 0.15, 0.3, 0.5)
BYTES, RATE = 110e6, 10e9
"""Parameters of a stage, and bytes/s: SDPipe's one node, as we assume it."""
SHARE = 0.9
"""Goal: of the throughput without any synchronisation."""
ITERATIONS_S, AVERAGING = (0.3, 1.8), (0.05, 0.2)
"""A pipeline's iteration, and the share of it that an averaging takes."""
NAP, HOME_SHARE, HOME_SEEDS = 1.5, 0.92, 4
"""Iterations that a straggler sleeps; the goal; runs whose throughputs are added up."""
MICROBATCHES, TICK_S = 8, 0.2


def average_s(size: int) -> float:
    """A ring over `size` members."""
    return 0.001 + 2 * (size - 1) / size * BYTES / RATE if size > 1 else 0.0


# ── random schedules ────────────────────────────────────────────────────────────────────────────────────────


def schedules(first: int, count: int, processes: int) -> dict[str, Any]:
    """`count` schedules with each set of rules."""
    found = {}
    with ProcessPoolExecutor(processes, initializer=dying_with_us()) as pool:
        for rules in RULES:
            outcomes = list(
                pool.map(partial(schedule, rules=rules), range(first, first + count), chunksize=50)
            )
            found[rules] = {
                "schedules": len(outcomes),
                "groups": sum(o.groups for o in outcomes),
                "came": sum(o.came for o in outcomes),
                "went": sum(o.went for o in outcomes),
                "broken": {o.seed: o.violation for o in outcomes if o.violation},
                "apart": sum(o.apart > 0 for o in outcomes),
            }
    return found


def runs(first: int, count: int, processes: int) -> dict[str, Any]:
    """`count` histories of grouped runs."""
    with ProcessPoolExecutor(processes, initializer=dying_with_us()) as pool:
        one = partial(simulate, faults=FAULTS)
        outcomes = list(pool.map(one, range(first, first + count), chunksize=20))
    return {
        "histories": len(outcomes),
        "faults": sum(o.faults for o in outcomes),
        "broken": {o.seed: o.violation for o in outcomes if o.violation},
        "dissolved": sum("dissolved" in o.kinds for o in outcomes),
    }


# ── one decision ────────────────────────────────────────────────────────────────────────────────────────────


def decisions() -> dict[str, float]:
    """Seconds of `ready` at one scheduler of 1,000 workers whose groups are of every size."""
    workers = names(WORKERS)
    took = []
    for window in (WaitWindow(0.0), WaitWindow(0.005), WaitWindow(0.2), WaitWindow(math.inf)):
        scheduler, now = GroupPipelines(1, workers, SPAN, window), 0.0
        for _ in range(3):
            for worker in workers:
                now += 0.001
                began = time.perf_counter()
                scheduler.ready(0, worker, now)
                took.append(time.perf_counter() - began)
    took.sort()
    return {"median": statistics.median(took), "99 %": took[len(took) * 99 // 100], "longest": took[-1]}


# ── SDPipe's settings ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A scheduler for so many stages and these workers, and the span that its groups are watched with."""

    make: Callable[[int, Sequence[str]], GroupScheduler]
    span: int | None = None
    average_s: Callable[[int], float] = average_s
    """Seconds of an averaging for a group of so many."""


def ways() -> dict[str, Way]:
    return {
        "no synchronisation": Way(make=lambda m, w: GroupPipelines(m, w, None, WaitWindow(0.0))),
        "AD-PSGD": Way(
            make=lambda m, w: GroupPipelines(m, w, None, WaitWindow(0.0)),
            average_s=lambda _alone: average_s(2),
        ),
        "all-reduce": Way(make=lambda m, w: GroupPipelines(m, w, None, WaitWindow(math.inf))),
        "hetpeer": Way(make=lambda m, w: GroupPipelines(m, w, SPAN, Adaptive(SPAN)), span=SPAN),
        "paper": Way(make=lambda m, w: Paper(m, w, SPAN, partial(Adaptive, SPAN, most=1.0)), span=SPAN),
        "artifact": Way(make=Artifact, span=SPAN),
    }


def throughput(way: Way, setting: PipelineSetting, seed: int) -> dict[str, Any]:
    """Iterations a second of all pipelines together; and how many groups there were, of which size."""
    workers = names(setting.pipelines)
    watch = GroupWatch(way.span or sys.maxsize, setting.stages, workers)
    setting = replace(setting, average_s=way.average_s)
    swarm = SimPipelines(setting, way.make(setting.stages, workers), seed, watch.formed)
    goal = ITERATIONS * len(workers)
    seconds = swarm.run(lambda: sum(swarm.iterations.values()) >= goal)
    return {
        "iterations_per_s": goal / seconds,
        "mean_group": goal * setting.stages / watch.groups,
        "apart": watch.apart / watch.groups if way.span else None,
    }


def sdpipe(seed: int) -> list[dict[str, Any]]:
    """Every setting, every way."""
    rows = []
    for pipelines, stages in SHAPES:
        for stage_s in STAGE_S:
            for name, sleep_s in SLEEPS.items():
                setting = PipelineSetting(
                    pipelines=pipelines, stages=stages, stage_s=stage_s, sleep_s=sleep_s
                )
                found = {way: throughput(how, setting, seed) for way, how in ways().items()}
                rows.append({"setting": name, "pipelines": pipelines, "stage_s": stage_s, "ways": found})
    return rows


def homes(seed: int) -> list[dict[str, Any]]:
    """Share of the throughput without synchronisation at the pace of homes, for each way."""
    known = ways()
    chosen = {way: known[way] for way in ("no synchronisation", "all-reduce", "hetpeer", "paper", "artifact")}
    rows = []
    for pipelines, stages in ((4, 2), (16, 2)):
        for iteration_s in ITERATIONS_S:
            for averaging in AVERAGING:
                setting = PipelineSetting(
                    pipelines=pipelines,
                    stages=stages,
                    microbatches=MICROBATCHES,
                    stage_s=iteration_s / (1 + (stages - 1) / MICROBATCHES),
                    sleep_s=NAP * iteration_s,
                    chance=0.1 / stages,
                )
                takes_s = averaging * iteration_s
                timed = {
                    way: replace(how, average_s=partial(_always, takes_s)) for way, how in chosen.items()
                }
                rates = {way: _rate(how, setting, seed) for way, how in timed.items()}
                ticked = f"hetpeer, a tick of {TICK_S} s"
                rates[ticked] = _rate(timed["hetpeer"], replace(setting, tick_s=TICK_S), seed)
                alone = rates["no synchronisation"]
                shares = {way: rate / alone for way, rate in rates.items() if rate is not alone}
                shape = {"pipelines": pipelines, "iteration_s": iteration_s, "averaging": averaging}
                rows.append(shape | {"shares": shares})
    return rows


def _always(seconds: float, size: int) -> float:
    """Seconds of an averaging of any size but one."""
    return seconds if size > 1 else 0.0


def _rate(way: Way, setting: PipelineSetting, seed: int) -> float:
    seeds = range(seed, seed + HOME_SEEDS)
    return sum(throughput(way, setting, one)["iterations_per_s"] for one in seeds)


def show(figures: dict[str, Any]) -> None:
    whole = figures["runs"]
    print(
        f"{whole['histories']} grouped runs with {whole['faults']} faults: {len(whole['broken'])} broken or "
        "hung,"
        f" in {whole['dissolved']} a cluster fell apart"
    )
    for rules, found in figures["schedules"].items():
        print(
            f"{rules}: {found['schedules']} schedules, {found['groups']} groups, {found['came']} came, "
            f"{found['went']} went:"
            f" {len(found['broken'])} broken or hung, in {found['apart']} somebody was apart"
        )
    decision = figures["decision_s"]
    print(
        f"a decision for {WORKERS} workers: {1e3 * decision['median']:.3f} ms in the middle,"
        f" {1e3 * decision['99 %']:.3f} in 99 of 100, {1e3 * decision['longest']:.3f} the longest"
    )
    print(
        "throughput of that without synchronisation (and of all-reduce's); mean group; groups after which "
        "somebody was apart"
    )
    for row in figures["sdpipe"]:
        alone, together = (row["ways"][w]["iterations_per_s"] for w in ("no synchronisation", "all-reduce"))
        print(f"{row['pipelines']} pipelines of {row['stage_s']} s a stage, {row['setting']}")
        for way, found in row["ways"].items():
            rate = found["iterations_per_s"]
            apart = "" if found["apart"] is None else f", {found['apart']:.1%} apart"
            print(f"  {way:20} {rate / alone:.2f} ({rate / together:.2f}), {found['mean_group']:.1f}{apart}")
    print("at the pace of homes, of the throughput without synchronisation")
    for row in figures["homes"]:
        shares = ", ".join(f"{way} {share:.3f}" for way, share in row["shares"].items())
        print(f"{row['pipelines']} pipelines, {row['iteration_s']} s, averaging {row['averaging']}: {shares}")
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument(
        "--count", type=int, default=10_000, help="random schedules of each kind (default: 10000)"
    )
    parser.add_argument("--runs", type=int, default=2_000, help="histories of grouped runs (default: 2000)")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    figures: dict[str, Any] = {
        "runs": runs(options.seed, options.runs, options.processes),
        "schedules": schedules(options.seed, options.count, options.processes),
        "decision_s": decisions(),
        "sdpipe": sdpipe(options.seed),
        "homes": homes(options.seed),
    }
    ours = figures["schedules"][RULES[0]]
    shares = [
        row["ways"]["hetpeer"]["iterations_per_s"] / row["ways"]["no synchronisation"]["iterations_per_s"]
        for row in figures["sdpipe"]
    ]
    figures["goals"] = goals = {
        "every batch of a grouped run is in the result once": not figures["runs"]["broken"],
        "no schedule hangs, and none leaves anybody apart": not ours["broken"] and not ours["apart"],
        "a decision for 1,000 workers takes less than 1 ms": figures["decision_s"]["99 %"] < DECISION_S,
        "nine tenths of the throughput without synchronisation": min(shares) >= SHARE,
        "0.92 of it at the pace of homes": min(row["shares"]["hetpeer"] for row in figures["homes"])
        >= HOME_SHARE,
    }
    figures["met"] = all(goals.values())
    return report.finish("grouping", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
