"""What a move has to earn, and what a step of the swarm as it is takes: all who hold a block reduce it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hetpeer.stages.planning.swarms.incremental_plan import IncrementalPlanner, PlanChange
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand
from hetpeer.stages.planning.swarms.stakes import WORTH, Stakes
from hetpeer.stages.planning.swarms.swarm_plan import planned
from tests.amounts import mostly_proof
from tests.stages.test_planning_living import roomy, turns
from tests.stages.test_planning_swarms import some_devices, some_work

MIB = float(1 << 20)


def in_homes(blocks: int) -> tuple[Devices, StepDemand]:
    """Eight at home (16 Mbit/s up), and a model as large as GPT-2 medium."""
    count = 8
    line = np.full((count, count), 2e6)
    devices = Devices(
        flops=np.full(count, 2e12),
        memory=np.full(count, 64e9),
        uplink=np.full(count, 2e6),
        latency=np.full((count, count), 0.02) * (1.0 - np.eye(count)),
        bandwidth=line * (1.0 - np.eye(count)),
    )
    weights = 1.42e9 / blocks
    work = StepDemand(
        flops=np.full(blocks, 1.4e12 / blocks),
        constants=np.full(blocks, 4 * weights),
        kept=np.full(blocks, 50 * MIB),
        crossing=np.array([0.0, *[4 * MIB] * (blocks - 1), 0.0]),
        reduced=np.full(blocks, weights),
        state=np.full(blocks, 3 * weights),
        microbatches=16,
    )
    return devices, work


def two_pipelines(
    blocks: int,
) -> tuple[list[tuple[int, int]], list[list[tuple[int | None, tuple[int, int]]]]]:
    """Four equal places in each: what device d holds, and the pipelines."""
    places = list(itertools.pairwise(range(0, blocks + 1, blocks // 4)))
    return [*places, *places], [list(enumerate(places)), list(enumerate(places, 4))]


def test_a_swarm_is_taken_for_what_it_is_and_not_for_its_best_part() -> None:
    """Its sums take most of a step, one of its pipelines alone a third of it: it counts as both."""
    devices, work = in_homes(24)
    held, lines = two_pipelines(24)
    cuts = PipelineCuts(devices, work)
    one = planned(devices, work, [cuts.at((0, 1, 2, 3), (0, 6, 12, 18, 24))])
    both = planned(devices, work, [cuts.at(d, (0, 6, 12, 18, 24)) for d in ((0, 1, 2, 3), (4, 5, 6, 7))])
    assert one.total_s < 0.4 * both.total_s
    planner = IncrementalPlanner(devices, work, held, lines, Stakes(steps=200), seed=0)
    assert planner.before_s == pytest.approx(both.total_s, rel=0.15)


def test_a_swarm_that_waits_for_its_sums_becomes_one_pipeline_if_it_has_the_blocks() -> None:
    devices, work = in_homes(24)
    held, lines = two_pipelines(24)
    planner = IncrementalPlanner(devices, work, held, lines, Stakes(steps=200), seed=0)
    change = planner.run(turns(2500))
    assert change is not None
    assert change.plan.total_s < 0.5 * planner.before_s


def test_those_whom_a_plan_spares_are_backups_and_add_nothing_up() -> None:
    """Four blocks, and eight volunteers that have room for one: a step is to take as long as with one of the
    pipelines alone. Nothing is fetched for it, and then all stays as it is.
    """
    devices, work = in_homes(4)
    devices = replace(devices, memory=np.full(8, 2e9))
    held, lines = two_pipelines(4)
    planner = IncrementalPlanner(devices, work, held, lines, Stakes(steps=200), seed=0)
    alone = planned(devices, work, [PipelineCuts(devices, work).at((0, 1, 2, 3), (0, 1, 2, 3, 4))])
    change = planner.run(turns(1500))
    assert change is not None
    assert change.plan.total_s == pytest.approx(alone.total_s)
    assert change.plan.total_s < 0.4 * planner.before_s
    assert change.moved == 0 < change.moving_s
    (one,) = change.plan.pipelines
    working = [place if device in one.devices else (0, 0) for device, place in enumerate(held)]
    left = [[(device, place) for device, place in line if device in one.devices] for line in lines]
    after = IncrementalPlanner(devices, work, working, left, Stakes(steps=200), seed=1)
    assert after.before_s == pytest.approx(alone.total_s)
    assert after.run(turns(1500)) is None


def test_with_memory_for_all_a_step_that_waited_for_sums_takes_what_one_computes() -> None:
    """Neither activations nor sums cross lines of 16 Mbit/s then: 45 s were the goal."""
    devices, work = in_homes(4)
    held, lines = two_pipelines(4)
    planner = IncrementalPlanner(devices, work, held, lines, Stakes(steps=200), seed=0)
    change = planner.run(turns(1500))
    assert change is not None
    assert planner.before_s > 200.0
    assert change.plan.total_s < 45.0


def test_backups_are_taken_in_again_when_sums_are_quick() -> None:
    """The lines are a hundred times as fast as they were."""
    devices, work = in_homes(4)
    devices = replace(devices, uplink=100.0 * devices.uplink, bandwidth=100.0 * devices.bandwidth)
    held, lines = two_pipelines(4)
    spared = [place if device < 4 else (0, 0) for device, place in enumerate(held)]
    change = IncrementalPlanner(devices, work, spared, [lines[0], []], Stakes(steps=200), seed=0).run(
        turns(1500)
    )
    assert change is not None
    assert len({device for one in change.plan.pipelines for device in one.devices}) > 4


@pytest.mark.parametrize("seed", mostly_proof(range(12), range(3)))
def test_what_was_promised_is_what_the_swarm_then_counts_as_at_most(seed: int) -> None:
    """Those whom the plan spares are backups then: so nothing is moved twice."""
    devices, work = roomy(some_devices(8, seed)), some_work(8, seed)
    held, lines = two_pipelines(8)
    planner = IncrementalPlanner(devices, work, held, lines, Stakes(steps=200), seed=seed)
    change = planner.run(turns(1500))
    if change is None:
        pytest.skip("nothing to move")
    pipelines = [list(zip(p.devices, itertools.pairwise(p.cuts), strict=True)) for p in change.plan.pipelines]
    places = [dict(itertools.chain(*pipelines)).get(device, (0, 0)) for device in range(8)]
    after = IncrementalPlanner(devices, work, places, pipelines, Stakes(steps=200), seed=seed)
    assert after.before_s <= change.plan.total_s * (1.0 + 1e-9)


# ── what a change has to earn ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("measured_s", "gain_s"),
    [(None, 5.0), (20.0, 5.0), (35.0, 5.0), (10.0, 2.5), (4.0, 1.0)],
    ids=["nothing measured", "as modelled", "the model misses something", "it sees too much", "far too much"],
)
def test_a_gain_is_what_the_model_says_or_less(measured_s: float | None, gain_s: float) -> None:
    """15 s instead of 20, by the model."""
    assert Stakes(steps=9, measured_s=measured_s).gain_s(20.0, 15.0) == pytest.approx(gain_s)


@pytest.mark.parametrize(
    ("stakes", "pays"),
    [
        (Stakes(steps=10), True),
        (Stakes(steps=9), False),
        (Stakes(steps=10, measured_s=19.0), False),
        (Stakes(steps=10, measured_s=49.0), True),
        (Stakes(steps=10, measured_s=51.0), False),
        (Stakes(steps=15, demand=1.5), True),
        (Stakes(steps=10, demand=1.5), False),
        (Stakes(steps=1000, demand=2.6), False),
        (Stakes(steps=0), False),
    ],
)
def test_a_change_pays_by_what_is_measured_and_by_the_steps_that_are_left(stakes: Stakes, pays: bool) -> None:
    """15 s instead of 20, for 49 s of moving; a gain below a tenth of the step is none."""
    assert stakes.pays(20.0, 15.0, 49.0) is pays


def test_a_run_that_stands_still_is_helped_at_any_price() -> None:
    assert Stakes(steps=0, measured_s=3.0, demand=4.0).pays(float("inf"), 100.0, 1e6)
    assert not Stakes(steps=10).pays(float("inf"), float("inf"), 1.0)


def lopsided(stakes: Stakes) -> PlanChange | None:
    """Fast volunteers at the ends of a pipeline with equal parts, slow ones in between."""
    devices, work = roomy(some_devices(4, 3)), some_work(8, 3)
    devices = replace(devices, flops=np.array([1e13, 1e11, 1e11, 1e13]))
    places = list(itertools.pairwise(range(0, 9, 2)))
    return IncrementalPlanner(devices, work, places, [list(enumerate(places))], stakes, seed=0).run(
        turns(1500)
    )


def test_moves_cost_what_moves_of_this_run_have_cost() -> None:
    usual = lopsided(Stakes(steps=200))
    assert usual is not None
    dear = lopsided(Stakes(steps=200, costs=3.0))
    assert dear is not None
    assert dear.moving_s > 1.5 * usual.moving_s
    assert lopsided(Stakes(steps=200, costs=1e6)) is None
    assert lopsided(Stakes(steps=200, measured_s=1e-3)) is None
    assert lopsided(Stakes(steps=200, demand=1.0 / WORTH)) is None
