"""The planner's swarms beside what people do without one, on testbeds like the papers'
(scenarios/testbeds.py), 20 seeds each.

Times are of a step, by the planner's cost model, and for some of them by simulation (the coordinator and the
volunteers in virtual time, peer/simulate/). Baselines are given what they leave open: of all numbers of
stages the best. `equal layers` cuts the blocks into equal parts, `equal work` so that devices take equally
long; `by region` has neighbours in one pipeline, `strided` in one stage; orders at random are the mean of
several; `best cuts` are those with the least period for each pipeline, which is what PipeDream's planner
looks for; `SWARM` sends from any device of a stage to any of the next (baselines/swarm_routing.py: a fluid at
its best; simulated are its stages, with this project's routes). All run 1F1B and an all-reduce. On
FusionLLM's testbeds all of them compress as its authors do. The gap is to a bound that nobody reaches: all
devices compute all the time, and nothing is sent.

    python -m benchmarks.testbeds
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.baselines import swarm_routing
from benchmarks.scenarios.testbeds import KINDS, NOT_GIVEN, Testbed, testbed
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.base.runtime import dying_with_us
from hetpeer.peer.planning.device_files import NamedDevices
from hetpeer.peer.simulate.scenario import Scenario
from hetpeer.peer.simulate.scenario_run import Places, play
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts, PlannedPipeline
from hetpeer.stages.planning.swarms.plan_search import PlanSearch
from hetpeer.stages.planning.swarms.swarm_plan import SwarmPlan, planned

CPU_S = 10.0
RANDOM_ORDERS = 10
CUTS = "equal layers", "equal work", "best cuts"
SIMULATED = 14
"""Steps of a simulation, of which the last six count."""
PAPER = {
    "FusionLLM 1": "1.45 to 9.39 over its baselines, with compression",
    "FusionLLM 2": "1.45 to 9.39 over its baselines, with compression",
    "HPS 3": "case 4 only: 1.41 over PipeDream, 1.39 over Dapple, 1.18 over SWARM",
    "DT-FM worldwide": "3.8 to 4.8 over Megatron and DeepSpeed",
}
"""Figures that its authors give."""


def bound_s(bed: Testbed) -> float:
    """All devices compute all the time."""
    work = bed.work
    return float(work.microbatches * work.flops.sum() * work.computed / bed.devices.flops.sum())


def laid_out(bed: Testbed, order: Sequence[int], cuts: str, *, strided: bool) -> SwarmPlan | None:
    """The best plan that puts `order` into pipelines of equally many stages, without those that memory does
    not allow; None if it allows none.
    """
    pipelines = PipelineCuts(bed.devices, bed.work)
    plans = []
    for stages in range(1, min(len(order), len(bed.work)) + 1):
        made = [_made(bed, pipelines, row, cuts) for row in _rows(order, stages, strided=strided)]
        if fitting := [one for one in made if one is not None]:  # the others are spared, as ours may be
            plans.append(planned(bed.devices, bed.work, fitting))
    return min(plans, key=lambda plan: plan.total_s, default=None)


def _rows(order: Sequence[int], stages: int, *, strided: bool) -> list[tuple[int, ...]]:
    replicas = len(order) // stages
    return [
        tuple(order[r + s * replicas] if strided else order[r * stages + s] for s in range(stages))
        for r in range(replicas)
    ]


def _made(bed: Testbed, pipelines: PipelineCuts, row: tuple[int, ...], cuts: str) -> PlannedPipeline | None:
    match cuts:
        case "equal layers":
            return pipelines.at(row, _equal(len(bed.work), len(row)))
        case "equal work":
            return pipelines.at(row, _by_work(bed, row))
        case _:
            return pipelines.best(row)


def _equal(blocks: int, stages: int) -> tuple[int, ...]:
    return tuple(blocks * stage // stages for stage in range(stages + 1))


def _by_work(bed: Testbed, row: Sequence[int]) -> tuple[int, ...]:
    """Each device gets as much of the work as its speed is of all, one block at least."""
    done = np.concatenate([[0.0], np.cumsum(bed.work.flops)])
    speeds = np.cumsum(bed.devices.flops[list(row)])
    blocks, cuts = len(bed.work), [0]
    for stage in range(1, len(row)):
        wanted = done[-1] * speeds[stage - 1] / speeds[-1]
        cut = int(np.abs(done - wanted).argmin())
        cuts.append(min(max(cut, cuts[-1] + 1), blocks - (len(row) - stage)))
    return (*cuts, blocks)


def baselines(bed: Testbed, seed: int) -> dict[str, SwarmPlan | None]:
    natural = list(range(len(bed.devices)))
    ways: dict[str, SwarmPlan | None] = {}
    for cuts in CUTS:
        for order, strided in (("by region", False), ("strided", True)):
            ways[f"{cuts}, {order}"] = laid_out(bed, natural, cuts, strided=strided)
    random = np.random.default_rng(seed)
    for number in range(RANDOM_ORDERS):
        order = random.permutation(len(natural)).tolist()
        ways[f"random {number}"] = laid_out(bed, order, "equal work", strided=False)
    return ways


def solve(name: str, seed: int, simulated: bool) -> dict[str, Any]:
    """One testbed: seconds of a step by the cost model, ours and theirs, and by simulation."""
    bed, began = testbed(name, seed), time.process_time()
    found = PlanSearch(bed.devices, bed.work, seed).run(lambda: time.process_time() - began < CPU_S)
    if found is None:
        return {"seed": seed, "failed": "nothing fits"}
    others = baselines(bed, seed)
    at_random = [plan.total_s for way, plan in others.items() if way.startswith("random") and plan]
    theirs = {way: plan for way, plan in others.items() if not way.startswith("random")}
    fluid = swarm_routing.best(bed.devices, bed.work)
    row: dict[str, Any] = {
        "seed": seed,
        "ours_s": found.best.total_s,
        "bound_s": bound_s(bed),
        "theirs_s": {way: plan.total_s for way, plan in theirs.items() if plan}
        | ({"at random": statistics.mean(at_random)} if at_random else {})
        | ({"SWARM": fluid.step_s} if fluid else {}),
        "pipelines": [len(one.devices) for one in found.best.pipelines],
    }
    if simulated:
        row["simulated_s"] = simulate(bed, Places.of(found.best), seed)
        best = min((plan for plan in theirs.values() if plan), key=lambda plan: plan.total_s, default=None)
        row["simulated_best_of_theirs_s"] = simulate(bed, Places.of(best), seed) if best else None
        row["simulated_swarm_s"] = simulate(bed, side_by_side(fluid), seed) if fluid else None
    return row


def side_by_side(fluid: swarm_routing.Fluid) -> Places:
    """The devices of each stage one after the other in as many clusters as the largest stage has devices:
    microbatches go on to any device that holds the next blocks, as they always do.
    """
    seated = [
        (device, (cluster, part[0]))
        for part, stage in zip(fluid.parts, fluid.stages, strict=True)
        for cluster, device in enumerate(stage)
    ]
    return Places(
        devices=tuple(device for device, _ in seated),
        layouts=(fluid.parts,) * max(map(len, fluid.stages)),
        seats=tuple(seat for _, seat in seated),
        step_s=fluid.step_s,
        period_s=fluid.period_s,
    )


def simulate(bed: Testbed, places: Places, seed: int) -> float | None:
    """Seconds of a step, the middle one; None if the run does not come to its end."""
    scenario = Scenario(
        devices=NamedDevices(tuple(f"d{n}" for n in range(len(bed.devices))), bed.devices),
        work=bed.work,
        model="",
        steps=SIMULATED,
        checkpoint_every=SIMULATED,
        seed=seed,
        equal_stages=None,
        seconds=CPU_S,
        churn=None,
        stragglers=None,
    )
    try:
        return play(scenario, places).median_s
    except LocalError:
        return None


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all seeds: step time of the others relative to ours, and ours relative to the bound."""
    solved = [row for row in rows if "failed" not in row]
    ways = sorted({way for row in solved for way in row["theirs_s"]})
    ratios = {
        way: [row["theirs_s"][way] / row["ours_s"] for row in solved if way in row["theirs_s"]]
        for way in ways
    }
    simulated = [row for row in solved if row.get("simulated_s")]
    return {
        "seeds": len(rows),
        "failed": len(rows) - len(solved),
        "over_ours": {
            way: {
                "median": round(statistics.median(some), 3),
                "worst": round(min(some), 3),
                "fits": len(some),
            }
            for way, some in ratios.items()
        },
        "of_bound": round(statistics.median([row["ours_s"] / row["bound_s"] for row in solved] or [0.0]), 2),
        "simulated_over_predicted": [round(row["simulated_s"] / row["ours_s"], 3) for row in simulated],
        "simulated_best_over_ours": _over_ours("simulated_best_of_theirs_s", simulated),
        "simulated_swarm_over_ours": _over_ours("simulated_swarm_s", simulated),
        "simulations_that_failed": sum("simulated_s" in row and not row["simulated_s"] for row in solved),
        "never_slower": len(solved) == len(rows) and all(min(some) >= 1.0 - 1e-9 for some in ratios.values()),
    }


def _over_ours(what: str, simulated: Sequence[dict[str, Any]]) -> list[float]:
    return [round(row[what] / row["simulated_s"], 3) for row in simulated if row[what]]


def measure(options: Any, pool: ProcessPoolExecutor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pending = {
        name: [
            pool.submit(solve, name, seed, number < options.simulated)
            for number, seed in enumerate(range(options.seed, options.seed + options.seeds))
        ]
        for name in options.names
    }
    for name, some in pending.items():
        rows = [one.result() for one in some]
        found[name] = summary(rows) | {
            "paper": PAPER.get(name, ""),
            "not_given": NOT_GIVEN.get(KINDS[name][0], ""),
            "rows": rows,
        }
        if not options.json:
            print("\n".join(told(name, found[name])), flush=True)
    goals = {
        "a plan for every testbed, never slower than theirs": all(o["never_slower"] for o in found.values()),
        "nor in simulation": all(
            not one["simulations_that_failed"]
            and min([*one["simulated_best_over_ours"], *one["simulated_swarm_over_ours"]], default=1.0) >= 1.0
            for one in found.values()
        ),
    }
    return {"cpu_s": CPU_S, "testbeds": found, "goals": goals, "met": all(goals.values())}


def told(name: str, one: dict[str, Any]) -> Iterator[str]:
    yield f"{name}: {one['seeds']} seeds, {one['of_bound']} of the bound" + (
        f"; paper: {one['paper']}" if one["paper"] else ""
    )
    if one["not_given"]:
        yield f"  not in the paper: {one['not_given']}"
    for way, ratio in one["over_ours"].items():
        rest = f"least {ratio['worst']:.2f}; fits {ratio['fits']}"
        yield f"  {way:26} {ratio['median']:6.2f} times as long ({rest})"
    if one["simulated_over_predicted"]:
        yield (
            f"  simulated over predicted {one['simulated_over_predicted']}; best of theirs over ours "
            f"{one['simulated_best_over_ours']}, SWARM's {one['simulated_swarm_over_ours']}"
        )


def show(figures: dict[str, Any]) -> None:
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=20, help="of each testbed (default: 20)")
    parser.add_argument("--simulated", type=int, default=3, help="seeds that are simulated too (default: 3)")
    parser.add_argument("--names", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs, initializer=dying_with_us()) as pool:
        figures = measure(options, pool)
    return report.finish("testbeds", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
