"""Clusters that live are divided anew, some at a time."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.formation import by_arrival, looks, volunteers, work
from hetpeer.stages.planning.swarms.cluster_recuts import MOST, recut
from hetpeer.stages.planning.swarms.clusters import divided
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts

ALWAYS = looks(100_000)
DEMAND = work()


def standing(seed: int):
    """Devices, and the clusters that they form in the worst of some orders of arrival."""
    devices = volunteers(seed, DEMAND)
    cuts, random = PipelineCuts(devices, DEMAND), np.random.default_rng(seed)
    arrived = [by_arrival(cuts, random.permutation(8).tolist()) for _ in range(50)]
    worst = min((one for one in arrived if one is not None), key=lambda one: one.batches_per_s)
    return devices, [(one.devices, one.cuts) for one in worst.plan.pipelines]


@pytest.mark.parametrize("seed", [0, 1])
def test_two_at_a_time_come_near_to_the_best_division_of_all(seed):
    devices, clusters = standing(seed)
    while (found := recut(devices, DEMAND, clusters, 0, looks(2000))) is not None and found.gain > 1.02:
        assert len(found.retiring) <= MOST < len(clusters)
        kept = [one for number, one in enumerate(clusters) if number not in found.retiring]
        clusters = [(one.devices, one.cuts) for one in found.after.plan.pipelines]
        assert all(one in clusters for one in kept)
        assert sorted(d for devices, _ in clusters for d in devices) == list(range(8))
        rate = found.after.batches_per_s
    best = divided(devices, DEMAND, 0, looks(400))
    assert rate >= 0.9 * best.batches_per_s


def test_who_is_in_no_cluster_may_be_in_one_afterwards():
    devices, clusters = standing(0)
    found = recut(devices, DEMAND, clusters[:3], 0, looks(2000))
    assert found is not None
    assert len(found.before.spare) == 2
    assert not found.after.spare
    assert found.gain > 1.1


def test_nothing_is_proposed_without_time_or_two_clusters_or_for_one_that_does_not_fit():
    devices, clusters = standing(0)
    assert recut(devices, DEMAND, clusters, 0, lambda: False) is None
    assert recut(devices, DEMAND, clusters[:1], 0, ALWAYS) is None
    assert recut(replace(devices, memory=devices.memory / 10), DEMAND, clusters, 0, ALWAYS) is None
