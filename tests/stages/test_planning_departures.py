"""Costs of departures, and plans that weigh them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hetpeer.stages.planning.swarms.departure_costs import HOUR_S, HeldPlace, departure_costs
from hetpeer.stages.planning.swarms.incremental_plan import IncrementalPlanner
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts
from hetpeer.stages.planning.swarms.plan_inputs import DepartureRates, Devices, StepDemand
from hetpeer.stages.planning.swarms.plan_search import PlanSearch
from hetpeer.stages.planning.swarms.stakes import LONGER, Stakes
from hetpeer.stages.planning.swarms.swarm_plan import SwarmPlan, holders_of, planned
from tests.stages.test_planning_living import turns
from tests.stages.test_planning_swarms import some_devices, some_work

AWAY_S = 40.0


def leaving(devices: Devices, *hourly: float) -> Devices:
    """The devices, leaving so often."""
    return replace(devices, departures=DepartureRates(rate=np.array(hourly) / HOUR_S, away_s=AWAY_S))


def alike(count: int) -> Devices:
    """Equal devices with fast lines, and memory for half of the blocks."""
    devices = some_devices(count, 0)
    line = np.full((count, count), 1e9)
    return replace(
        devices,
        flops=np.full(count, 1e12),
        memory=np.full(count, 1e12),
        uplink=np.full(count, 1e9),
        latency=np.zeros((count, count)),
        bandwidth=line,
    )


def test_departures_of_which_nobody_speaks_cost_nothing() -> None:
    devices, work = some_devices(4, 1), some_work(6, 1)
    plans = []
    for one in (devices, leaving(devices, 0, 0, 0, 0)):
        found = PlanSearch(one, work, 0).run(turns(3000))
        assert found is not None
        plans.append(found.best)
    assert plans[0].departures is None
    assert plans[0].expected_s == plans[0].total_s
    assert plans[1].expected_s == pytest.approx(plans[1].total_s)


def test_the_only_holders_departure_takes_the_run_back_to_its_checkpoint() -> None:
    """By simulation: steps are done one after the other, and a departure begins again at the checkpoint."""
    devices, work = leaving(alike(1), 20.0), replace(some_work(3, 0), checkpoint_every=4)
    costs = departure_costs(devices, work, [HeldPlace(0, 0, 3, 1.0)], 30.0)
    assert costs is not None
    assert devices.departures is not None
    fetch_s = float(work.state.sum() / devices.uplink[0])
    away_s = AWAY_S + fetch_s
    random, spans = np.random.default_rng(0), []
    rate = costs.rollbacks / HOUR_S
    assert rate == pytest.approx(20.0 / HOUR_S * (1.0 - float(devices.departures.away[0])))
    for _ in range(20_000):
        took = 0.0
        while (next_s := random.exponential(1.0 / rate)) < 4 * 30.0:
            took += next_s
            while (next_s := random.exponential(1.0 / rate)) < away_s:  # it leaves while it recovers
                took += next_s
            took += away_s
        spans.append(took + 4 * 30.0)
    assert costs.step_s == pytest.approx(float(np.mean(spans)) / 4, rel=0.06)
    assert costs.leftovers == 0.0


def test_another_holder_has_leftovers_in_place_of_roll_backs() -> None:
    work = some_work(3, 0)
    both = [HeldPlace(0, 0, 3, 0.25), HeldPlace(1, 0, 3, 0.75)]
    costs = departure_costs(leaving(alike(2), 20.0, 0.0), work, both, 30.0)
    assert costs is not None
    there = 1.0 / (1.0 + 20.0 / HOUR_S * AWAY_S)
    assert costs.rollbacks == 0.0
    assert costs.leftovers == pytest.approx(20.0 * there * 0.25 * work.microbatches)
    lost = 20.0 / HOUR_S * there * 0.25 * (30.0 + AWAY_S)
    assert costs.step_s == pytest.approx(30.0 / (1.0 - lost))
    sometimes = departure_costs(leaving(alike(2), 20.0, 1.0), work, both, 30.0)
    assert sometimes is not None
    assert 0.0 < sometimes.rollbacks < 0.5
    assert sometimes.step_s > costs.step_s


def test_a_run_that_never_reaches_a_checkpoint_has_costs_that_are_numbers() -> None:
    work = some_work(3, 0)
    costs = departure_costs(leaving(alike(1), 3600.0), work, [HeldPlace(0, 0, 3, 1.0)], 1e6)
    assert costs is not None
    assert math.isfinite(costs.step_s)


def steady_holders(plan: SwarmPlan, devices: Devices) -> bool:
    """Whether each block has a holder that never leaves."""
    assert devices.departures is not None
    steady = set(np.flatnonzero(devices.departures.rate == 0.0).tolist())
    return all(steady.intersection(some) for some in holders_of(plan.pipelines))


@pytest.mark.parametrize("seed", range(3))
def test_each_block_gets_a_steady_holder_where_that_costs_little(seed: int) -> None:
    """Four equal devices, two of which leave now and then: each pair of neighbours is alike for speed."""
    work = some_work(6, seed)
    devices = alike(4)
    devices = replace(devices, memory=np.full(4, 0.7 * PipelineCuts(devices, work).work.memory.sum() + 1e9))
    hourly = leaving(devices, 30.0, 30.0, 0.0, 0.0)
    fast = PlanSearch(devices, work, seed).run(turns(4000))
    steady = PlanSearch(hourly, work, seed).run(turns(4000))
    assert fast is not None
    assert steady is not None
    assert steady_holders(steady.best, hourly)
    unaware = planned(hourly, work, fast.best.pipelines)
    assert steady.best.expected_s <= unaware.expected_s


def test_a_device_that_leaves_all_the_time_is_spared() -> None:
    work, devices = some_work(6, 0), leaving(alike(3), 0.0, 0.0, 300.0)
    found = PlanSearch(devices, work, 0).run(turns(3000))
    assert found is not None
    assert all(2 not in one.devices for one in found.best.pipelines)


def test_a_running_swarm_gives_the_place_of_one_that_leaves_often_to_a_steady_one() -> None:
    """Devices 1 and 2 are alike for speed, and 2 has no place yet."""
    work = some_work(2, 0)
    held, lines = [(0, 1), (1, 2), (0, 0)], [[(0, (0, 1)), (1, (1, 2))]]
    devices = alike(3)
    tight = replace(devices, memory=np.full(3, 1.001 * _most_memory(devices, work)))
    for hourly, moves in (((0.0, 6.0, 0.0), True), ((0.0, 0.1, 0.1), False), ((0.0, 0.0, 0.0), False)):
        planner = IncrementalPlanner(leaving(tight, *hourly), work, held, lines, Stakes(steps=1000), seed=0)
        change = planner.run(turns(3000))
        assert (change is not None) is moves
        if change is not None:
            assert {device for one in change.plan.pipelines for device in one.devices} == {0, 2}
            assert planner.steadier_s(change) > 0.0


def _most_memory(devices: Devices, work: StepDemand) -> float:
    """Bytes with which two devices hold one of two blocks each."""
    return max(stage.memory for stage in PipelineCuts(devices, work).stages((0, 1), (0, 1, 2)))


def test_a_step_becomes_little_longer_for_a_steadier_holder() -> None:
    stakes = Stakes(steps=1000)
    assert not stakes.pays(10.0, 10.0, 60.0)
    assert stakes.pays(10.0, 10.4, 60.0, steadier_s=5.0)
    assert not stakes.pays(10.0, 10.0 * (1.0 + LONGER) + 0.1, 60.0, steadier_s=1000.0)
