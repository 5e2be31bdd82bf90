"""Borders moved for the whole step's sake."""

import math
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts
from hetpeer.stages.planning.swarms.plan_search import PlanSearch
from hetpeer.stages.planning.swarms.swarm_plan import CutRefinement, planned
from tests.stages.test_planning_living import roomy, turns
from tests.stages.test_planning_swarms import by_hand, some_devices, some_work

ORDERS = ((0, 1, 2), (3, 4, 5))


def borders(seed: int) -> CutRefinement:
    devices, work = roomy(some_devices(6, seed)), some_work(9, seed)
    return CutRefinement(devices, work, PipelineCuts(devices, work))


@pytest.mark.parametrize("seed", range(6))
def test_no_single_move_is_left_that_would_help(seed):
    found = borders(seed)
    begun = found.alike(ORDERS)
    assert begun is not None
    settled = found.settled(begun, lambda: True)
    assert settled.total_s <= begun.total_s
    lines = [(one.devices, one.cuts) for one in settled.pipelines]
    for number, (order, cuts) in enumerate(lines):
        for border in range(1, len(order)):
            for by in (-1, 1):
                moved = (*cuts[:border], cuts[border] + by, *cuts[border + 1 :])
                if all(a < b for a, b in pairwise(moved)):
                    other = found.plan((*lines[:number], (order, moved), *lines[number + 1 :]))
                    assert other is None or other.total_s >= settled.total_s * (1 - 1e-8)


def test_it_stops_when_the_time_is_over():
    found = borders(0)
    begun = found.alike(ORDERS)
    assert begun is not None
    assert found.settled(begun, lambda: False) is begun
    assert found.settled(begun, turns(1)).total_s <= begun.total_s


def test_equal_parts_of_more_devices_than_blocks_are_none():
    assert borders(0).alike((tuple(range(6)), (0,) * 10)) is None


# ── pipelines that are cut alike ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(12))
def test_what_is_cut_alike_is_cut_as_well_as_can_be(seed):
    devices, work = some_devices(6, seed), some_work(7, seed)
    ways = [(0, *inner, 7) for inner in combinations(range(1, 7), 2)]
    best = min(max(by_hand(devices, work, order, cuts) for order in ORDERS) for cuts in ways)
    found = PipelineCuts(devices, work).alike(ORDERS)
    if found is None:
        assert best == math.inf
        return
    assert found[0].cuts == found[1].cuts
    assert max(one.period for one in found) == pytest.approx(best)


def test_the_search_cuts_alike_where_sums_take_long():
    """Three places with two devices each, fast lines within a place, slow ones between: a stage in each
    place adds up at home, whatever suits a pipeline by itself.
    """
    near = np.arange(6)[:, None] // 2 == np.arange(6)[None, :] // 2
    devices = replace(
        roomy(some_devices(6, 0)),
        flops=np.array([4e12, 1e12, 2e12, 2e12, 1e12, 4e12]),
        bandwidth=np.where(near, 1e10, 1e7),
        uplink=np.full(6, 1e10),
    )
    work, orders = some_work(9, 0), ((0, 2, 4), (1, 3, 5))
    work = replace(work, crossing=work.crossing / 1e4)
    pipelines = PipelineCuts(devices, work)
    each = [one for order in orders if (one := pipelines.best(order)) is not None]
    apart = planned(devices, work, each)
    found = PlanSearch(devices, work, 0).plan(orders)
    assert found is not None
    assert each[0].cuts != each[1].cuts
    assert found.pipelines[0].cuts == found.pipelines[1].cuts
    assert found.total_s < 0.8 * apart.total_s
    quick = PlanSearch(replace(devices, bandwidth=np.full((6, 6), 1e10)), work, 0).plan(orders)
    assert quick is not None
    assert [one.cuts for one in quick.pipelines] == [one.cuts for one in each], "they take no time there"
