"""Plans that live: what is moved pays, a death moves little, and nobody flaps."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from hetpeer.stages.planning.swarms.current_step_time import as_it_is, as_routed
from hetpeer.stages.planning.swarms.incremental_plan import IncrementalPlanner
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts
from hetpeer.stages.planning.swarms.plan_inputs import Compression, Devices, StepDemand
from hetpeer.stages.planning.swarms.plan_search import PlanSearch
from hetpeer.stages.planning.swarms.stakes import WORTH, Stakes
from hetpeer.stages.planning.swarms.swarm_plan import planned
from tests.amounts import mostly_proof
from tests.stages.test_planning_swarms import some_devices, some_work

STEPS = 200


def turns(count: int):
    """`on` for so many looks."""
    left = iter(range(count))
    return lambda: next(left, None) is not None


def searched(devices: Devices, work: StepDemand, seed: int):
    """A swarm that was planned, as it stands there: what each holds, and its pipelines with their places."""
    found = PlanSearch(devices, work, seed).run(turns(2000))
    assert found is not None
    lines = [
        [(d, place) for d, place in zip(p.devices, itertools.pairwise(p.cuts), strict=True)]
        for p in found.best.pipelines
    ]
    held = {d: place for line in lines for d, place in line}
    return [held.get(d, (0, 0)) for d in range(len(devices))], lines


def roomy(devices: Devices) -> Devices:
    return replace(devices, memory=np.full(len(devices), 1e12))


@pytest.mark.parametrize("seed", mostly_proof(range(12), range(3)))
def test_a_death_moves_what_was_lost_and_a_neighbours_blocks_at_most(seed):
    devices, work = roomy(some_devices(8, seed)), some_work(12, seed)
    held, lines = searched(devices, work, seed)
    line = max(lines, key=len)
    if len(line) < 2:
        pytest.skip("no pipeline of several")
    place = seed % len(line)
    dead, lost = line[place]
    beside = [line[n][1] for n in (place - 1, place + 1) if 0 <= n < len(line)]
    line[place] = (None, lost)
    left = [d for d in range(8) if d != dead]
    number = {d: n for n, d in enumerate(left)}
    fewer = devices.some(left)
    seats = [[(None if d is None else number[d], where) for d, where in one] for one in lines]
    change = IncrementalPlanner(
        fewer, work, [held[d] for d in left], seats, Stakes(steps=STEPS), seed=seed
    ).run(turns(1000))
    if as_it_is(fewer, work, [held[d] for d in left]) == math.inf:
        assert change is not None
    if change is not None:
        assert change.moved <= (lost[1] - lost[0]) + max(end - begin for begin, end in beside)
        covered = {b for p in change.plan.pipelines for b in range(p.cuts[0], p.cuts[-1])}
        assert covered == set(range(12))


@pytest.mark.parametrize("seed", mostly_proof(range(6), range(2)))
def test_who_was_planned_well_stays(seed):
    """Nothing is moved twice: the swarm after a change is not changed again."""
    devices, work = roomy(some_devices(6, seed)), some_work(10, seed)
    held, lines = searched(devices, work, seed)
    for _ in range(2):
        change = IncrementalPlanner(devices, work, held, lines, Stakes(steps=STEPS), seed=seed).run(
            turns(3000)
        )
        if change is None:
            return
        lines = [
            [(d, place) for d, place in zip(p.devices, itertools.pairwise(p.cuts), strict=True)]
            for p in change.plan.pipelines
        ]
        held = [dict(itertools.chain(*lines)).get(d, (0, 0)) for d in range(6)]
    pytest.fail("changed twice, though nothing had changed")


@pytest.mark.parametrize("seed", mostly_proof(range(6), range(2)))
def test_a_change_is_worth_it(seed):
    """Volunteers that sit anywhere, with equal cuts: what is proposed is shorter by a tenth at least, also
    with what moving takes.
    """
    devices, work = roomy(some_devices(4, seed)), some_work(8, seed)
    lines = [[(0, (0, 2)), (1, (2, 4)), (2, (4, 6)), (3, (6, 8))]]
    held = [place for _, place in lines[0]]
    before = as_it_is(devices, work, held)
    change = IncrementalPlanner(devices, work, held, lines, Stakes(steps=STEPS), seed=seed).run(turns(3000))
    if change is not None:
        assert change.plan.total_s <= (1 - WORTH) * before
        assert (before - change.plan.total_s) * STEPS > change.moving_s


def test_nothing_is_moved_for_the_last_steps():
    devices, work = roomy(some_devices(4, 3)), some_work(8, 3)
    devices = replace(devices, flops=np.array([1e13, 1e11, 1e11, 1e13]))
    lines = [[(0, (0, 2)), (1, (2, 4)), (2, (4, 6)), (3, (6, 8))]]
    held = [place for _, place in lines[0]]
    assert (
        IncrementalPlanner(devices, work, held, lines, Stakes(steps=STEPS), seed=0).run(turns(2000))
        is not None
    )
    assert IncrementalPlanner(devices, work, held, lines, Stakes(steps=0), seed=0).run(turns(2000)) is None


def test_blocks_of_who_is_gone_go_to_whoever_has_the_memory():
    devices, work = some_devices(3, 1), some_work(6, 1)
    needed = work.memory.sum() + 32 * (work.kept.sum() + 4 * work.crossing.max())
    devices = replace(devices, memory=np.array([1.0, 2 * needed, 2 * needed]))
    devices = replace(devices, memory=np.array([work.memory[:2].sum() * 1.01 + 1e9, needed, needed]))
    lines = [[(0, (0, 2)), (None, (2, 4)), (1, (4, 6))]]
    change = IncrementalPlanner(
        devices, work, [(0, 2), (4, 6), (0, 0)], lines, Stakes(steps=STEPS), seed=0
    ).run(turns(500))
    assert change is not None
    for pipeline in change.plan.pipelines:
        for stage in PipelineCuts(devices, work).stages(pipeline.devices, pipeline.cuts):
            assert stage.memory <= devices.memory[stage.device]


@pytest.mark.parametrize("memory", [1.3e9, 4e9, 1e12])
def test_after_a_death_a_pipeline_that_is_still_being_filled_is_in_nobodys_way(memory):
    """Its one volunteer has no room for the model, or could take all of it; what is lost is the dead
    one's, and the same few blocks move.
    """
    blocks, cuts = 12, list(itertools.pairwise((0, 2, 5, 9, 12)))
    devices = Devices(
        flops=np.array([1e12, 1.1e12, 0.9e12, 1e12]),
        memory=np.array([4e9, 4e9, 4e9, memory]),
        uplink=np.full(4, 2.5e6),
        latency=np.full((4, 4), 0.02) * (1.0 - np.eye(4)),
        bandwidth=np.full((4, 4), 2.5e6),
    )
    work = StepDemand(
        flops=np.full(blocks, 1e11),
        constants=np.full(blocks, 4e8),
        kept=np.full(blocks, 1e7),
        crossing=np.array([0.0, *[4e6] * (blocks - 1), 0.0]),
        reduced=np.full(blocks, 5e7),
        state=np.full(blocks, 5e7),
        microbatches=32,
    )
    whole = [(0, cuts[0]), (1, cuts[1]), (None, cuts[2]), (2, cuts[3])]
    filling = [(3, cuts[0]), *((None, place) for place in cuts[1:])]
    held = [cuts[0], cuts[1], cuts[3], cuts[0]]
    living = IncrementalPlanner(devices, work, held, [whole, filling], Stakes(steps=STEPS), seed=0, lost={0})
    change = living.run(turns(500))
    assert change is not None
    assert change.moved <= 4 + 3, "the four that are lost, and the three of a neighbour"
    assert {block for p in change.plan.pipelines for block in range(p.cuts[0], p.cuts[-1])} == set(
        range(blocks)
    )


def test_places_that_nobody_has_come_for_are_no_loss():
    """After a loss few blocks move; while a pipeline is still being filled as many as are worth it."""
    devices = roomy(some_devices(5, 0))
    devices = replace(devices, flops=np.full(5, devices.flops.max()))
    work, held = some_work(8, 0), [(0, 7), (7, 8), (0, 1), (2, 3), (3, 8)]
    filling = [(2, (0, 1)), (None, (1, 2)), (3, (2, 3)), (4, (3, 8))]
    lines = [[(0, (0, 7)), (1, (7, 8))], filling]
    few, many = (
        IncrementalPlanner(devices, work, held, lines, Stakes(steps=STEPS), seed=0, lost=lost).run(
            turns(3000)
        )
        for lost in ({0, 1}, ())
    )
    assert few is None or few.moved <= 2
    assert many is not None
    assert many.moved > 2


def test_the_last_device_takes_everything_in_finite_time():
    devices, work = roomy(some_devices(2, 0)).some([1]), some_work(4, 0)
    lines = [[(None, (0, 2)), (0, (2, 4))]]
    change = IncrementalPlanner(devices, work, [(2, 4)], lines, Stakes(steps=STEPS), seed=0).run(turns(100))
    assert change is not None
    assert change.moved == 2
    state = work.state
    assert change.moving_s < 60 + 10 * state.sum() / devices.uplink[0]


HOMES = np.array([0, 0, 1, 1])
ACROSS = [(0, 2), (1, 3)], [(0, 2), (3, 1)]
WITHIN = [(0, 1), (2, 3)], [(1, 0), (2, 3)]


def two_homes() -> tuple[Devices, StepDemand]:
    """Devices 0 and 1 in one home, 2 and 3 in another; what goes between takes a hundred times as long,
    and computing hardly anything.
    """
    together = HOMES[:, None] == HOMES[None, :]
    devices = Devices(
        flops=np.full(4, 1e13),
        memory=np.full(4, 1e10),
        uplink=np.full(4, 1e9),
        latency=np.where(together, 1e-3, 3e-2),
        bandwidth=np.where(together, 1e8, 1e6),
    )
    work = StepDemand(
        flops=np.full(8, 1e11),
        constants=np.full(8, 1e9),
        kept=np.full(8, 1e6),
        crossing=np.array([0.0, *[1e6] * 7, 0.0]),
        reduced=np.full(8, 1e5),
        state=np.full(8, 1e6),
        microbatches=16,
    )
    return devices, work


def halves(pairs: list[tuple[int, int]]):
    """What each holds, and the lines, of pipelines of two with half of the blocks each."""
    lines = [[(one, (0, 4)), (other, (4, 8))] for one, other in pairs]
    held = dict(itertools.chain(*lines))
    return [held[device] for device in range(4)], lines


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("pairs", ACROSS)
def test_pipelines_over_slow_lines_are_changed_once(pairs, staleness):
    devices, work = two_homes()
    work = replace(work, staleness=staleness)
    held, lines = halves(pairs)
    measured = np.zeros((4, 4), dtype=np.bool_)
    for one, other in pairs:
        measured[one, other] = measured[other, one] = True
    living = IncrementalPlanner(devices, work, held, lines, Stakes(steps=STEPS), seed=0, measured=measured)
    change = living.run(turns(3000))
    assert change is not None
    assert change.plan.total_s < 0.5 * living.before_s
    for pipeline in change.plan.pipelines:
        assert len({HOMES[device] for device in pipeline.devices}) == 1
    lines = [list(zip(p.devices, itertools.pairwise(p.cuts), strict=True)) for p in change.plan.pipelines]
    held = [dict(itertools.chain(*lines)).get(d, (0, 0)) for d in range(4)]
    assert (
        IncrementalPlanner(devices, work, held, lines, Stakes(steps=STEPS), seed=1).run(turns(3000)) is None
    )


@pytest.mark.parametrize("pairs", WITHIN)
def test_pipelines_over_fast_lines_stay(pairs):
    devices, work = two_homes()
    held, lines = halves(pairs)
    living = IncrementalPlanner(devices, work, held, lines, Stakes(steps=STEPS), seed=0)
    assert living.run(turns(3000)) is None
    by_hand = planned(devices, work, [PipelineCuts(devices, work).at(pair, (0, 4, 8)) for pair in pairs])
    assert 0.8 * by_hand.total_s < living.before_s <= by_hand.total_s


def test_lines_to_another_pipeline_count_as_routes_take_them():
    """Neighbours in both pipelines are far from each other, and each is near the other pipeline's: once
    that is measured routes cross over, and before they do not.
    """
    devices, work = two_homes()
    held, lines = halves([(0, 2), (3, 1)])
    unknown = IncrementalPlanner(
        devices, work, held, lines, Stakes(steps=STEPS), seed=0, measured=np.zeros((4, 4), dtype=np.bool_)
    )
    known = IncrementalPlanner(
        devices, work, held, lines, Stakes(steps=STEPS), seed=0, measured=np.ones((4, 4), dtype=np.bool_)
    )
    assert known.before_s < 0.2 * unknown.before_s
    assert unknown.before_s == pytest.approx(
        unknown.change([((0, 2), (0, 4, 8)), ((3, 1), (0, 4, 8))]).plan.total_s
    )
    assert known.run(turns(3000)) is None


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("seed", mostly_proof(range(20), range(4)))
def test_at_best_a_swarm_is_no_slower_than_its_pipelines(seed, staleness):
    """Whatever lines, cuts and compression: what is measured is allowed to be used, and what is not is no
    better than the sender's own.
    """
    random = np.random.default_rng(seed)
    devices, work = roomy(some_devices(6, seed)), some_work(9, seed)
    squeezed = Compression(forward=4.0, backward=2.0, reduce=2.0, adaptive=bool(seed % 2))
    work = replace(work, staleness=staleness, compression=(Compression(), squeezed)[seed // 2 % 2])
    orders = random.permutation(6).reshape(2, 3).tolist()
    cuts = [(0, *sorted(random.choice(range(1, 9), 2, replace=False).tolist()), 9) for _ in orders]
    lines = [
        list(zip(order, itertools.pairwise(cut), strict=True))
        for order, cut in zip(orders, cuts, strict=True)
    ]
    held = [dict(itertools.chain(*lines))[device] for device in range(6)]
    pipelines = PipelineCuts(devices, work)
    plan = planned(
        devices, work, [pipelines.at(tuple(order), cut) for order, cut in zip(orders, cuts, strict=True)]
    )
    for measured in (np.zeros((6, 6), dtype=np.bool_), random.random((6, 6)) < 0.5):
        routed = as_routed(devices, lines, measured)
        assert as_it_is(devices, work, held, routed) <= plan.total_s * (1 + 1e-9)


def test_a_swarm_as_it_is_is_no_slower_than_its_pipelines():
    """Microbatches may go from any holder to any other: that is at least as good as pipelines by
    themselves, but for what is sent.
    """
    devices, work = roomy(some_devices(6, 2)), some_work(9, 2)
    endless = replace(
        devices, bandwidth=np.full((6, 6), 1e15), uplink=np.full(6, 1e15), latency=np.zeros((6, 6))
    )
    pipelines = PipelineCuts(endless, work)
    cuts = [((0, 1, 2), (0, 3, 6, 9)), ((3, 4, 5), (0, 2, 7, 9))]
    plan = planned(endless, work, [pipelines.at(*one) for one in cuts])
    held = [place for _, borders in cuts for place in itertools.pairwise(borders)]
    assert as_it_is(endless, work, held) <= plan.total_s * (1 + 1e-9)
    assert as_it_is(endless, work, [(0, 3), (3, 6), (0, 0), (0, 2), (2, 6), (0, 0)]) == math.inf
