"""Borders moved for the whole step's sake."""

from itertools import pairwise

import pytest

from hetpeer.stages.planning.swarms.borders import Borders
from hetpeer.stages.planning.swarms.pipelines import Pipelines
from tests.stages.test_planning_living import roomy, turns
from tests.stages.test_planning_swarms import some_devices, some_work

ORDERS = ((0, 1, 2), (3, 4, 5))


def borders(seed: int) -> Borders:
    devices, work = roomy(some_devices(6, seed)), some_work(9, seed)
    return Borders(devices, work, Pipelines(devices, work))


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
