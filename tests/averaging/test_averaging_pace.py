"""How often clusters average with others among stragglers, in virtual time (docs/averaging.md, "Not every
time").
"""

import pytest

from benchmarks.time_to_loss import NONE, TRAINING
from benchmarks.windows import WAYS, VirtualRun
from hetpeer.averaging.groups.wait_window import Adaptive
from hetpeer.bootstrap.run.settings import AveragingSettings
from hetpeer.bootstrap.service.core_interface import window_of

SEEDS = range(4)
SHARE = 0.18
"""Least share of the batches after which a cluster averages with others."""


def trained(way, seed):
    return VirtualRun(WAYS[way], seed, learns=False).result()


def averaged(way, seed):
    """Share of the batches after which a cluster averages with others."""
    groups = trained(way, seed)["groups"]
    return sum(size * count for size, count in groups.items() if size > 1) / TRAINING.steps


@pytest.mark.parametrize("seed", SEEDS)
def test_delayed_clusters_average_often_and_lose_little_time(seed):
    """An averaging takes six tenths of a batch."""
    assert averaged("grouped, delayed", seed) >= SHARE
    alone = trained(NONE, seed)["batches_per_s"]
    assert trained("grouped, delayed", seed)["batches_per_s"] >= 0.9 * alone


def test_it_is_seen_if_delayed_averagings_count_like_others():
    assert sum(averaged("delayed, as rarely as without", seed) < SHARE for seed in SEEDS) >= 3


def test_only_delayed_runs_average_more_often():
    for delayed, interval in ((False, 12), (True, 2)):
        window = window_of(AveragingSettings(span=40, delayed=delayed), trains_on=False)
        assert isinstance(window, Adaptive)
        for _ in range(10):
            window.formed("ab", 2, 0.0)
            window.arrived("a", 1.0)
        window.averaged(0.6)
        assert window.interval == interval
