"""Clusters that train batches of their own, against enumeration and Ravnest's search."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.baselines.ravnest import genetic
from benchmarks.formation import by_arrival, volunteers, work
from hetpeer.stages.planning.swarms.clusters import Clusters, clusters_of, divided
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts
from hetpeer.stages.planning.swarms.plan_inputs import Averaging, Devices, StepDemand
from tests.stages.test_planning_swarms import some_work


def some(count: int, seed: int) -> tuple[Devices, StepDemand]:
    """Devices of which two or three hold the model together, and the work."""
    random = np.random.default_rng(seed)
    work = replace(some_work(4, seed), averaging=Averaging(interval=5))
    up = random.uniform(1e6, 2e7, count)
    needed = work.memory.sum() + 4 * work.kept.sum() + 8 * work.crossing.max()
    devices = Devices(
        flops=random.uniform(1e12, 4e12, count),
        memory=needed * random.uniform(0.5, 0.9, count),
        uplink=up,
        latency=random.uniform(1e-3, 0.05, (count, count)),
        bandwidth=np.minimum(up[:, None], 4 * up[None, :]),
    )
    return devices, work


def looks(count: int) -> Callable[[], bool]:
    left = iter(range(count))
    return lambda: next(left, None) is not None


def divisions(left: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All sets of pipelines of `left`, in each order; devices may be in none."""
    if not left:
        yield ()
        return
    first, rest = left[0], left[1:]
    yield from divisions(rest)
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            after = tuple(one for one in rest if one not in others)
            for order in itertools.permutations((first, *others)):
                yield from ((order, *more) for more in divisions(after))


@pytest.mark.parametrize("seed", range(4))
def test_as_many_batches_as_the_best_of_all_divisions(seed: int) -> None:
    devices, work = some(4, seed)
    cuts = PipelineCuts(devices, work)
    found = divided(devices, work, 0, looks(600))
    assert found is not None
    best = 0.0
    for division in divisions(tuple(range(4))):
        made = [one for order in division if (one := cuts.best(order)) is not None]
        if made and len(made) == len(division):
            spare = set(range(4)).difference(*division)
            if not any(cuts.best(order) for order in itertools.permutations(spare) if order):
                best = max(best, clusters_of(devices, work, made).batches_per_s)
    assert found.batches_per_s >= best * (1 - 1e-9)


def test_more_time_is_no_worse_and_nobody_is_spared_who_could_take_part() -> None:
    devices, work = some(9, 7)
    rates = []
    for count in (300, 600, 1200):
        found = divided(devices, work, 0, looks(count))
        assert found is not None
        cuts = PipelineCuts(devices, work)
        assert not any(cuts.best(order) for order in itertools.permutations(found.spare) if order)
        rates.append(found.batches_per_s)
    assert rates == sorted(rates)


def test_the_balance_is_the_difference_of_the_batches() -> None:
    found = Clusters.__dataclass_fields__
    assert {"plan", "batch_s", "spare"} == set(found)
    devices, work = some(4, 1)
    one = divided(devices, work, 0, looks(300))
    assert one is not None
    assert one.imbalance_s == max(one.batch_s) - min(one.batch_s)
    count = work.microbatches
    assert one.batch_s == tuple(pipeline.seconds(count) for pipeline in one.plan.pipelines)


def test_too_little_memory_and_an_exact_run() -> None:
    devices, work = some(2, 0)
    assert divided(replace(devices, memory=devices.memory / 100), work, 0, looks(10)) is None
    with pytest.raises(ValueError, match="average"):
        divided(devices, replace(work, averaging=None), 0, looks(10))


def test_ravnests_clusters_are_balanced_and_have_the_memory() -> None:
    memory, rate = np.array([4.0, 4.0, 2.0, 2.0]), np.array([2.0, 1.0, 1.0, 0.5])
    found = genetic(memory, rate, 6.0, seed=0)
    assert found is not None
    sums = [(memory / rate)[found == cluster].sum() for cluster in np.unique(found)]
    assert len(sums) == 2
    assert abs(sums[0] - sums[1]) == pytest.approx(0.0)
    assert genetic(memory, rate, 13.0, seed=0) is None


def test_eight_uneven_volunteers_in_the_worst_order() -> None:
    demand = work()
    devices = volunteers(0, demand)
    cuts, random = PipelineCuts(devices, demand), np.random.default_rng(0)
    arrived = [by_arrival(cuts, random.permutation(8).tolist()) for _ in range(100)]
    found = divided(devices, demand, 0, looks(400))
    assert found is not None
    assert not found.spare
    assert found.batches_per_s >= 1.5 * min(one.batches_per_s for one in arrived if one is not None)
