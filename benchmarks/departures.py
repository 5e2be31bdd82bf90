"""HPS' case 4 with its sweep of disconnections: 16, 32 and 48 volunteers, 0 to 50 % leave in a batch.

Case 3 of HPS' Table 2 (half V100s, four to a machine, half RTX 2080s; lines of 50 to 300 Mbit/s and 100 to
150 ms; ALBERT-xxlarge's size, microbatches of 4; batches of 256 in place of 512, simulated in half of the
time), in which half of the volunteers, drawn by
the seed, are unreliable: in each batch each of them leaves with the given probability, at any moment, and is
back at the next batch. The paper does not say which devices those are, nor how long a batch is meant to be:
here it is a step of our plan for speed alone, and all ways have the same departures at the same times.

`reliable`: our plan that weighs departures, which it is told (docs/planning.md, Reliability); `plain`: our
plan for speed alone. Both are simulated with the daemon's cores (peer/simulate/): leases, leftovers,
roll-backs to the last checkpoint (one in `--checkpoint-every` steps), copies that are fetched.

`SWARM's bound` is a fluid at its best (baselines/swarm_routing.py, churn_models.py): work is divisible,
deaths are seen at once, what a dead peer had accumulated is made up for, and a stage without peers waits for
one with its parameters; of all numbers of stages the best under these very departures. `SWARM` is simulated
without departures (its stages, with its wiring of swarm_wiring.py or with our routes, whichever is faster),
and loses as large a part by departures as its bound does: which is flattering. Steps count that survive.

    python -m benchmarks.departures
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.baselines import swarm_routing
from benchmarks.baselines.churn_models import Departure, Fleet, waiting
from benchmarks.baselines.swarm_wiring import wired
from benchmarks.scenarios.testbeds import Testbed, hps
from benchmarks.testbeds import side_by_side
from hetpeer.bootstrap.log.history import History
from hetpeer.dht.base.runtime import dying_with_us
from hetpeer.peer.planning.device_files import NamedDevices
from hetpeer.peer.simulate.scenario import Scenario
from hetpeer.peer.simulate.scenario_run import Places, swarm_config
from hetpeer.peer.simulate.sim_hooks import ViolationError
from hetpeer.peer.simulate.sim_numerics import Symbols
from hetpeer.peer.simulate.sim_swarm import SimSwarm
from hetpeer.stages.planning.swarms.plan_inputs import DepartureRates, Devices
from hetpeer.stages.planning.swarms.plan_search import PlanSearch
from hetpeer.stages.planning.swarms.swarm_plan import SwarmPlan

VOLUNTEERS = 16, 32, 48
RATES = 0.0, 0.1, 0.3, 0.5
SETTLED = 2
"""Steps before anybody leaves, which do not count."""
STILL = 6
"""Steps' time for which SWARM is simulated without departures."""
ENDLESS = 100_000
WAYS = "reliable", "plain", "SWARM", "SWARM's bound"
HPS_OVER_SWARM = 1.18
"""Case 4, ALBERT-xxlarge: 96.8 over 82.2 minutes a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One history of each way: so many volunteers, of whom half leave with a probability in a batch."""

    volunteers: int
    rate: float
    seed: int
    batches: int
    microbatches: int
    checkpoint_every: int
    plan_s: float
    """Processor seconds of a search for a plan."""


def bed_of(case: Case) -> Testbed:
    bed = hps(3, case.seed, case.volunteers)
    work = replace(bed.work, microbatches=case.microbatches, checkpoint_every=case.checkpoint_every)
    return replace(bed, work=work)


def unreliable(case: Case) -> frozenset[int]:
    """Half of the devices, whatever they are."""
    drawn = np.random.default_rng([case.seed, 4]).permutation(case.volunteers)
    return frozenset(drawn[: case.volunteers // 2].tolist())


def departures(case: Case, batch_s: float) -> list[Departure]:
    """All departures from moment 0 on, by device."""
    found = []
    for device in sorted(unreliable(case)):
        draw = random.Random(f"{case.seed} {device} {case.rate}")
        for batch in range(case.batches):
            if draw.random() < case.rate:
                at = (batch + draw.random()) * batch_s
                found.append(Departure(peer=str(device), at=at, back=(batch + 1) * batch_s))
    return found


def searched(case: Case, devices: Devices, bed: Testbed) -> SwarmPlan:
    began = time.process_time()
    found = PlanSearch(devices, bed.work, case.seed).run(lambda: time.process_time() - began < case.plan_s)
    assert found is not None, "the testbed's memory is enough for a plan"
    return found.best


def told(case: Case, bed: Testbed, batch_s: float) -> Devices:
    """The devices with what they are known to do: leaves a second while there, and half a batch away."""
    rate = np.zeros(case.volunteers)
    there_s = batch_s * (1.0 - case.rate / 2.0)
    rate[list(unreliable(case))] = case.rate / there_s
    return replace(bed.devices, departures=DepartureRates(rate=rate, away_s=batch_s / 2.0))


def solve(case: Case, rates: Sequence[float]) -> list[dict[str, Any]]:
    """Steps an hour of each way at each rate, and the roll-backs of ours; `case.rate` has no meaning."""
    bed = bed_of(case)
    plain = searched(case, bed.devices, bed)
    still = swarm_still(case, bed)
    return [_row(replace(case, rate=rate), bed, plain, still) for rate in rates]


def _row(case: Case, bed: Testbed, plain: SwarmPlan, still: float) -> dict[str, Any]:
    batch_s = plain.total_s
    gone = departures(case, batch_s)
    plan = searched(case, told(case, bed, batch_s), bed) if case.rate else plain
    ours = simulate(case, bed, Places.of(plain), gone, batch_s)
    until = case.batches * batch_s
    bound, undisturbed = (swarm_bound(bed, some, until) for some in (gone, ()))
    return {
        "seed": case.seed,
        "rate": case.rate,
        "batch_s": batch_s,
        "departures": len(gone),
        "plain": ours,
        "reliable": simulate(case, bed, Places.of(plan), gone, batch_s) if case.rate else ours,
        "SWARM": {"steps_an_hour": still * bound / undisturbed if undisturbed else 0.0},
        "SWARM's bound": {"steps_an_hour": bound},
        "plan": _seen(plan, unreliable(case)),
        "plain_plan": _seen(plain, unreliable(case)),
    }


def _seen(plan: SwarmPlan, leaving: frozenset[int]) -> dict[str, Any]:
    """The plan: seconds of a step, expected ones, devices of each pipeline, and who of them may leave."""
    return {
        "step_s": plan.total_s,
        "expected_s": plan.expected_s,
        "pipelines": [list(one.devices) for one in plan.pipelines],
        "may_leave": sum(device in leaving for one in plan.pipelines for device in one.devices),
    }


def swarm_still(case: Case, bed: Testbed) -> float:
    """SWARM's steps an hour in the simulator while nobody leaves."""
    fluid = swarm_routing.best(bed.devices, bed.work)
    if fluid is None:
        return 0.0
    places = side_by_side(fluid)
    names = {f"v{number}": device for number, device in enumerate(places.devices)}
    undisturbed = replace(case, rate=0.0, batches=STILL, checkpoint_every=ENDLESS)
    routed = simulate(undisturbed, bed, places, (), fluid.step_s)["steps_an_hour"]
    with wired(bed.devices, bed.work, names):
        return float(max(routed, simulate(undisturbed, bed, places, (), fluid.step_s)["steps_an_hour"]))


def swarm_bound(bed: Testbed, gone: Sequence[Departure], until: float) -> float:
    """Most steps an hour of all numbers of stages."""
    found = [0.0]
    for fluid in swarm_routing.all_of(bed.devices, bed.work):
        fleet = Fleet(
            stages=[{str(device): fluid.rates[device] for device in stage} for stage in fluid.stages],
            microbatches=bed.work.microbatches,
            fill_s=fluid.fill_s + fluid.after_s,
            rejoin_s=0.0,
        )
        here = {str(device) for stage in fluid.stages for device in stage}
        leaving = [one for one in gone if one.peer in here]
        found.append(3600.0 * waiting(fleet, leaving, until) / until)
    return max(found)


def simulate(
    case: Case, bed: Testbed, places: Places, gone: Sequence[Departure], batch_s: float
) -> dict[str, Any]:
    """Surviving steps an hour from the moment when the first steps are done, for all batches' time."""
    scenario = Scenario(
        devices=NamedDevices(tuple(f"d{n}" for n in range(len(bed.devices))), bed.devices),
        work=bed.work,
        model="",
        steps=ENDLESS,
        checkpoint_every=case.checkpoint_every,
        seed=case.seed,
        equal_stages=None,
        seconds=case.plan_s,
        churn=None,
        stragglers=None,
    )
    numerics = Symbols(len(bed.work))
    swarm = SimSwarm(case.seed, swarm_config(scenario, places), numerics)
    hardware = swarm.config.hardware
    assert hardware is not None
    for number, volunteer in enumerate(swarm.volunteers.values()):
        seconds = hardware.state_s(number)
        volunteer.fetch_s = (seconds, seconds)
    peers = {str(device): f"v{number}" for number, device in enumerate(places.devices)}
    trouble = _Trouble(swarm, [replace(one, peer=peers[one.peer]) for one in gone if one.peer in peers])
    limit_s = 20.0 * SETTLED * places.step_s + len(bed.work) * float(bed.work.state.max()) / 1e6
    _until(swarm, limit_s, trouble, case.batches * batch_s)
    if trouble.began is None:
        return {"steps_an_hour": 0.0, "rollbacks": 0, "departures": 0, "again": 0.0}
    history = History.of(swarm.log)
    steps = max(0, history.version - SETTLED)
    return {
        "steps_an_hour": 3600.0 * steps / (case.batches * batch_s),
        "rollbacks": history.rollbacks,
        "departures": trouble.departures,
        "again": numerics.executed / len(bed.work) - history.version * bed.work.microbatches,
    }


class _Trouble:
    """Departures from the moment when SETTLED steps are done."""

    def __init__(self, swarm: SimSwarm, gone: Sequence[Departure]) -> None:
        self.began: float | None = None
        self.departures = 0
        self._swarm, self._gone, self._commits = swarm, gone, 0
        swarm.hooks.append(self._happened)

    def _happened(self, what: str) -> None:
        self._commits += what == "record commit"
        if self._commits < SETTLED or self.began is not None:
            return
        self.began = self._swarm.world.now
        for one in self._gone:
            self._swarm.world.after(one.at, lambda peer=one.peer: self._leave(peer))
            self._swarm.world.after(one.back, self._swarm.volunteers[one.peer].start)

    def _leave(self, peer: str) -> None:
        self._swarm.volunteers[peer].kill()
        self.departures += 1


def _until(swarm: SimSwarm, limit_s: float, trouble: _Trouble, lasts_s: float) -> None:
    """Run until `lasts_s` after the departures began; at most `limit_s` before that."""
    swarm.start()
    swarm.world.run(limit_s, lambda: trouble.began is not None)
    if trouble.began is not None:
        swarm.world.run(trouble.began + lasts_s, lambda: swarm.completed is not None)
    if swarm.completed is False:
        raise ViolationError(f"the run was halted: {swarm.log[-1]}")


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The middle of all seeds, and each seed's ratios of ours over the others."""
    return {
        "steps_an_hour": {
            way: round(statistics.median(row[way]["steps_an_hour"] for row in rows), 2) for way in WAYS
        },
        "reliable_over": {
            way: [_over(row["reliable"]["steps_an_hour"], row[way]["steps_an_hour"]) for row in rows]
            for way in WAYS[1:]
        },
        "rollbacks": {way: [row[way]["rollbacks"] for row in rows] for way in WAYS[:2]},
        "again": {way: [round(row[way]["again"]) for row in rows] for way in WAYS[:2]},
        "rows": list(rows),
    }


def _over(ours: float, others: float) -> float | None:
    """None: the others stand still."""
    return round(ours / others, 3) if others else None


def measure(options: Any, pool: ProcessPoolExecutor) -> dict[str, Any]:
    case = Case(
        volunteers=0,
        rate=0.0,
        seed=0,
        batches=options.batches,
        microbatches=options.microbatches,
        checkpoint_every=options.checkpoint_every,
        plan_s=options.plan_seconds,
    )
    pending = {
        pool.submit(solve, replace(case, volunteers=volunteers, seed=seed), options.rates): volunteers
        for seed in range(options.seed, options.seed + options.seeds)
        for volunteers in options.volunteers
    }
    solved: dict[int, list[list[dict[str, Any]]]] = {volunteers: [] for volunteers in options.volunteers}
    for one in as_completed(pending):
        solved[pending[one]].append(one.result())
        if not options.json:
            tell(pending[one], one.result())
    found = {
        str(volunteers): {
            f"{rate:.0%}": summary(sorted((rows[number] for rows in some), key=lambda row: row["seed"]))
            for number, rate in enumerate(options.rates)
        }
        for volunteers, some in solved.items()
    }
    middle = [one["steps_an_hour"] for sweep in found.values() for one in sweep.values()]
    goals = {
        "never slower than the plan for speed alone": all(m["reliable"] >= m["plain"] for m in middle),
        f"{HPS_OVER_SWARM} times SWARM": all(m["reliable"] >= HPS_OVER_SWARM * m["SWARM"] for m in middle),
        "above SWARM's bound": all(m["reliable"] >= m["SWARM's bound"] for m in middle),
    }
    return {
        "batches": options.batches,
        "microbatches": options.microbatches,
        "checkpoint_every": options.checkpoint_every,
        "volunteers": found,
        "goals": goals,
        "met": all(goals.values()),
    }


def tell(volunteers: int, rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        each = ", ".join(f"{way} {row[way]['steps_an_hour']:.1f}" for way in WAYS)
        back = f"roll-backs {row['reliable']['rollbacks']} for {row['plain']['rollbacks']}"
        again = f"done again {row['reliable']['again']:.0f} for {row['plain']['again']:.0f}"
        about = f"{volunteers} volunteers, {row['rate']:.0%}, seed {row['seed']}"
        print(f"{about}: steps an hour: {each}; {back}, {again}", flush=True)


def show(figures: dict[str, Any]) -> None:
    for volunteers, sweep in figures["volunteers"].items():
        for rate, one in sweep.items():
            print(f"{volunteers} volunteers, {rate}: steps an hour, the middle: {one['steps_an_hour']}")
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=5, help="of each case (default: 5)")
    parser.add_argument("--volunteers", type=int, nargs="+", default=list(VOLUNTEERS), help="numbers of them")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="shares that leave")
    parser.add_argument("--batches", type=int, default=8, help="of departures (default: 8)")
    parser.add_argument("--microbatches", type=int, default=64, help="of a batch (default: 64)")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps (default: 10, as init's)")
    parser.add_argument("--plan-seconds", type=float, default=2.0, help="processor seconds (default: 2)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--name", default="departures", help="of the file of results")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs, initializer=dying_with_us()) as pool:
        figures = measure(options, pool)
    return report.finish(options.name, figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
