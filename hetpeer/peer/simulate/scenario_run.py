"""Play of a scenario in virtual time: places from the planner, then the daemon's own cores on the scenario's
devices.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.planning.model_workload import too_small
from hetpeer.peer.simulate.network.sim_uplinks import SimHardware
from hetpeer.peer.simulate.scenario import Scenario
from hetpeer.peer.simulate.sim_config import SwarmConfig
from hetpeer.peer.simulate.sim_hooks import ViolationError
from hetpeer.peer.simulate.sim_numerics import Symbols
from hetpeer.peer.simulate.sim_swarm import SimSwarm
from hetpeer.stages.planning.swarms.departure_costs import HOUR_S
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand
from hetpeer.stages.planning.swarms.plan_search import PlanSearch
from hetpeer.stages.planning.swarms.swarm_plan import SwarmPlan, planned

SCHEMA = "hetpeer.simulation/1"
Range = tuple[int, int]
SimSeat = tuple[int, int]
"""(cluster, first block) of a place."""
SETTLE = 8
"""Steps at the beginning that do not count, at most half: volunteers still join and learn their windows."""
FETCHES = 10
"""Number of fetches of all blocks, by the slowest volunteer, that the time limit allows."""
NUMBERS, SHARD = 100, 10
"""Elements of a simulated block, and of a shard of it."""
TOO_LONG = 50.0
"""Multiple of the predicted time after which a scenario fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Places of volunteers when a scenario begins."""

    devices: tuple[int, ...]
    """Numbers of the devices that take part."""
    layouts: tuple[tuple[Range, ...], ...]
    """Blocks of each place, cluster by cluster."""
    seats: tuple[SimSeat, ...]
    """Seat of each device in `devices`; other places are open."""
    step_s: float
    """Predicted seconds of a step."""
    period_s: float
    """Predicted seconds of a microbatch at the slowest device: links with a codec aim at it."""

    @classmethod
    def of(cls, plan: SwarmPlan) -> Places:
        """Places of a plan."""
        layouts = tuple(tuple(pairwise(one.cuts)) for one in plan.pipelines)
        return cls(
            devices=tuple(device for one in plan.pipelines for device in one.devices),
            layouts=layouts,
            seats=tuple((cluster, begin) for cluster, layout in enumerate(layouts) for begin, _ in layout),
            step_s=plan.total_s,
            period_s=max(one.period for one in plan.pipelines),
        )

    def pipelines(self) -> list[dict[Range, int]]:
        """Mapping blocks → device for each cluster that has a device."""
        taken = dict(zip(self.seats, self.devices, strict=True))
        found = [
            {place: taken[cluster, place[0]] for place in layout if (cluster, place[0]) in taken}
            for cluster, layout in enumerate(self.layouts)
        ]
        return [one for one in found if one]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOutcome:
    """Result of a scenario. Seconds are virtual."""

    places: Places
    names: tuple[str, ...]
    steps: int
    """Number of steps that count; a step that was rolled back was done more than once."""
    counted_s: float
    """Seconds of these steps, from the last commit before them to the last of all."""
    seconds: float
    """Seconds of the whole run."""
    step_s: tuple[float, ...]
    """Seconds of each step that counts."""
    goodput: float
    """Share of computed block-microbatches that were counted."""
    again: float
    """Microbatches that were computed again, each at all blocks: leftovers, and steps that were rolled back.
    """
    departures: int
    rollbacks: int

    @property
    def median_s(self) -> float:
        """Median seconds of a step, in virtual time."""
        return statistics.median(self.step_s)

    @property
    def steps_an_hour(self) -> float:
        """Steps an hour, of those that count."""
        return HOUR_S * self.steps / self.counted_s

    def document(self) -> dict[str, Any]:
        """Object that `--json` prints."""
        return {
            "schema": SCHEMA,
            "predicted_s": self.places.step_s,
            "step_s": {"median": self.median_s, "least": min(self.step_s), "most": max(self.step_s)},
            "steps_an_hour": self.steps_an_hour,
            "seconds": self.seconds,
            "goodput": self.goodput,
            "departures": self.departures,
            "rollbacks": self.rollbacks,
            "again": self.again,
            "pipelines": [
                [{"device": self.names[device], "blocks": list(place)} for place, device in one.items()]
                for one in self.places.pipelines()
            ],
        }


def play(scenario: Scenario, places: Places | None = None) -> ScenarioOutcome:
    """Play a scenario from `places`, or from those of the plan that it asks for.

    Raises `LocalError` HP-PLAN-005 if nothing fits, HP-SIM-002 if the run does not come to its end.
    """
    places = places or Places.of(plan_of(scenario))
    numerics = Symbols(len(scenario.work))
    swarm = SimSwarm(scenario.seed, swarm_config(scenario, places), numerics)
    assert swarm.config.hardware is not None
    fetching = 0.0
    for number, volunteer in enumerate(swarm.volunteers.values()):
        seconds = swarm.config.hardware.state_s(number)
        volunteer.fetch_s = (seconds, seconds)
        fetching = max(fetching, seconds * len(scenario.work))
    trouble = ScenarioChurn(swarm, scenario, places.devices)
    limit = TOO_LONG * places.step_s * scenario.steps + FETCHES * fetching + 3600.0
    try:
        swarm.run(limit)
    except ViolationError as error:
        raise LocalError(
            "HP-SIM-002",
            "the simulated run does not come to its end",
            why=str(error),
            fix="give it longer between failures, more devices, or checkpoints more often",
            exit_code=ExitCode.TOO_SMALL,
        ) from None
    commits = [record for record in swarm.log if record["kind"] == "commit"]
    settled = min(SETTLE, scenario.steps // 2)
    counted = len(scenario.work) * scenario.work.microbatches * scenario.steps
    return ScenarioOutcome(
        places=places,
        names=scenario.devices.names,
        steps=scenario.steps - commits[settled - 1]["step"] - 1,
        counted_s=trouble.committed_at[-1] - trouble.committed_at[settled - 1],
        seconds=trouble.committed_at[-1],
        step_s=tuple(float(commit["seconds"]) for commit in commits[settled:]),
        goodput=counted / numerics.executed,
        again=(numerics.executed - counted) / len(scenario.work),
        departures=trouble.departures,
        rollbacks=sum(record["kind"] == "rollback" for record in swarm.log),
    )


def plan_of(scenario: Scenario) -> SwarmPlan:
    """Plan for the devices: equal stages in the file's order, or the best found. Raises `LocalError`."""
    devices, work = scenario.devices.devices, scenario.work
    if scenario.equal_stages is not None:
        stages, blocks = scenario.equal_stages, len(work)
        cuts = tuple(blocks * stage // stages for stage in range(stages + 1))
        pipelines = PipelineCuts(devices, work)
        orders = [
            tuple(range(first, first + stages)) for first in range(0, len(devices) - stages + 1, stages)
        ]
        made = [one for order in orders if (one := pipelines.at(order, cuts)) is not None]
        if not made:
            raise LocalError(
                "HP-SIM-001",
                "the scenario cannot begin",
                why=f"no {stages} devices in the order of the file have the memory for {stages} equal parts",
                fix='give other stages, another order, or plan = "search"',
                exit_code=ExitCode.CONFIG,
            )
        return planned(devices, work, made)
    found = PlanSearch(devices, work, scenario.seed).run(lambda: time.process_time() < scenario.seconds)
    if found is not None:
        return found.best
    raise too_small(scenario.devices, scenario.work, scenario.model)


def swarm_config(scenario: Scenario, places: Places) -> SwarmConfig:
    """The simulator's settings for `scenario`: one volunteer for each device that has a place, its seat.

    `layouts` cut the model into places, cluster by cluster; a seat is the place that a volunteer takes.
    """
    devices = scenario.devices.devices.some(places.devices)
    defaults = SwarmConfig()
    return replace(
        defaults,
        volunteers=len(devices),
        layouts=places.layouts,
        seats=places.seats,
        steps=scenario.steps,
        microbatches=scenario.work.microbatches,
        staleness=scenario.work.staleness,
        evaluation_microbatches=0,
        slot_capacity=scenario.work.microbatches,
        checkpoint_every=scenario.checkpoint_every,
        latency_s=(float(devices.latency.min()), float(devices.latency.max())),
        # The coordinator's own defaults (CoordinatorConfig): SwarmConfig has shorter ones, for toy swarms.
        # A reduce gets the time of one shard more, since it shows no progress within a shard.
        stall_s=15.0,
        reduce_s=20.0 + _piece_s(devices, scenario.work),
        sync_s=120.0,
        speeds=tuple(devices.flops.tolist()),
        uplinks=tuple(_uplinks(devices)),
        duplicates=0.0,
        shard_length=SHARD,
        hardware=SimHardware(devices=devices, work=scenario.work, target_s=places.period_s),
    )


def _uplinks(devices: Devices) -> list[float]:
    """Bytes/s of each device's uplink; if only pairs are known, the sum of its links."""
    apart = ~np.eye(len(devices), dtype=np.bool_)
    together = np.where(apart, devices.bandwidth, 0.0).sum(axis=1)
    uplinks: list[float] = np.where(np.isfinite(devices.uplink), devices.uplink, together).tolist()
    return uplinks


def _piece_s(devices: Devices, work: StepDemand) -> float:
    """Seconds of a shard of the largest block over the slowest link, beside those for all other volunteers.

    Shards are larger here than in the daemon, and a reduce shows no progress between them.
    """
    piece = float(work.reduced.max()) / work.compression.reduce * SHARD / NUMBERS
    apart = ~np.eye(len(devices), dtype=np.bool_)
    slowest = min(float(devices.uplink.min()), float(devices.bandwidth[apart].min(initial=np.inf)))
    return piece * len(devices) / slowest


class ScenarioChurn:
    """Churn and stragglers of `scenario` in `swarm`."""

    def __init__(self, swarm: SimSwarm, scenario: Scenario, devices: Sequence[int]) -> None:
        """`devices`: the device of each volunteer. It leaves at the same times in every plan."""
        self.departures = 0
        self.committed_at: list[float] = []
        """Virtual seconds at which each commit was made."""
        self._swarm, self._scenario = swarm, scenario
        swarm.hooks.append(self._committed)
        given, churn = scenario.devices.devices.departures, scenario.churn
        for name, device in zip(swarm.volunteers, devices, strict=True):
            draw = np.random.default_rng([scenario.seed, device])
            if churn is not None:
                self._live(name, draw, 1.0 / (60.0 * churn.mtbf_minutes), churn.away_s)
            elif given is not None and given.rate[device] > 0:
                self._live(name, draw, float(given.rate[device]), given.away_s)

    def _committed(self, what: str) -> None:
        swarm, stragglers = self._swarm, self._scenario.stragglers
        if what != "record commit":
            return
        self.committed_at.append(swarm.world.now)
        if stragglers is not None:
            for volunteer in swarm.volunteers.values():
                if volunteer.alive and swarm.world.random.random() < stragglers.chance:
                    volunteer.worker.hang(stragglers.sleep_s)

    def _live(self, name: str, draw: np.random.Generator, rate: float, away_s: float) -> None:
        """Let `name` vanish `rate` times a second, and each time return after `away_s`."""
        swarm = self._swarm
        volunteer = swarm.volunteers[name]

        def vanish() -> None:
            if swarm.completed is None:
                volunteer.kill()
                self.departures += 1
                swarm.world.after(away_s, volunteer.start)
                swarm.world.after(away_s, lambda: self._live(name, draw, rate, away_s))

        swarm.world.after(float(draw.exponential(1.0 / rate)), vanish)
