"""Clusters that never stop for an averaging: a mean has its place among steps that overlap."""

import statistics
from dataclasses import replace
from itertools import islice
from unittest.mock import patch

import pytest

from hetpeer.averaging.member.work_in_progress import WorkInProgress
from hetpeer.bootstrap.coordinator.steps import StepQueue
from hetpeer.bootstrap.grouped.cluster import Cluster
from hetpeer.bootstrap.grouped.mean_order import MeanOrder
from tests.amounts import mostly_proof
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import BLOCKS, HistoryOutcome, shape, updates_behind
from tests.simulation.sim_grouped import GroupedSwarm, simulate

FAULTS, STEPS = 20, 16
FEW = (0, 8)
MANY = [(first, first + 100) for first in (8, 108, 208)]
"""First seed and the one after the last."""
CALM = (1, 2, 3)
"""Histories in which no cluster falls apart without faults."""
FOUR = HistoryConfig(
    volunteers=8,
    layouts=(((0, 2), (2, BLOCKS)),),
    steps=160,
    microbatches=4,
    evaluation_microbatches=0,
    evaluate_every=1000,
    slot_capacity=4,
    checkpoint_every=1000,
    staleness=1,
    latency_s=(0.02, 0.02),
    speeds=(1.0,),
    duplicates=0.0,
)
"""Four clusters of two stages; all stay."""


def history(seed: int, faults: int = FAULTS) -> HistoryOutcome:
    """Staleness 1 to 3, one or two batches between averagings; in some the first steps do not overlap, or
    only their first microbatches do.
    """
    shaped = replace(
        shape(seed),
        steps=STEPS,
        staleness=1 + seed % 3,
        fresh_steps=seed // 5 % 3,
        evaluate_every=100 if seed % 4 else 5,
    )
    if seed // 3 % 3 == 0:
        shaped = replace(shaped, head_start=1 + seed % shaped.microbatches)
    return simulate(seed, faults=faults, config=shaped, interval=1 + seed // 7 % 2, delayed=True)


@pytest.mark.parametrize(("first", "end"), mostly_proof([FEW, *MANY], [FEW]))
def test_histories_in_which_means_come_among_steps_keep_every_invariant(first, end):
    kinds, across = set(), 0
    for seed in range(first, end):
        outcome = history(seed)
        assert outcome.violation is None, outcome
        assert outcome.faults >= 14, outcome
        across += outcome.across > 0
        kinds |= outcome.kinds
    assert across >= (end - first) // 4
    assert kinds >= {"founded", "commit", "average", "installed", "dissolved", "checkpoint", "reign"}


def trained(interval: int) -> tuple[float, float]:
    """(updates behind in the mean, batches a second) of four clusters, from the 20th batch to the 140th."""
    swarm = GroupedSwarm(0, FOUR, CheckedSymbols(BLOCKS), Coverage(), 10, interval, delayed=True)
    at = []
    swarm.hooks.append(lambda what: at.append(swarm.world.now) if what == "record commit" else None)
    swarm.run(2000.0)
    return statistics.fmean(updates_behind(swarm.log)[20:140]), 120 / (at[140] - at[20])


@pytest.mark.parametrize("interval", [1, 2])
def test_steps_overlap_across_averagings(interval):
    """With one batch between averagings there was no overlap at all, with two every other step was fresh."""
    behind, rate = trained(interval)
    with patch.object(MeanOrder, "overlaps", lambda _self, _cluster: False):
        before, slower = trained(interval)
    assert behind >= 0.9
    assert before <= 0.6
    assert rate >= 1.1 * slower


def test_without_delay_every_averaging_is_awaited():
    """Its parameters are the cluster's own: nothing may be made of them meanwhile."""
    outcome = simulate(3, faults=0, config=replace(FOUR, steps=24), interval=1, delayed=False)
    assert (outcome.violation, outcome.overlapped, outcome.across) == (None, 0, 0)
    assert "average" in outcome.kinds


def number_twice(self, work, now, original=StepQueue.open):
    """The step behind a mean has its number."""
    begun = original(self, replace(work, after_mean=False), now)
    if work.after_mean:
        self.mean = list(self)[-1].number
    return begun


def forgotten(self, held, number):
    """Parameters with which steps began are gone once a mean is installed."""
    return number + 1


def one_more(self):
    """A mean that is awaited lets one more step begin."""
    return 0 < len(self) <= self._context.config.staleness + (self.mean is not None)


def out_of_turn(self):
    """A mean is installed as soon as it is decided, whatever number it has."""
    return self.at_rest or self.mean is not None


MUTANTS = {
    "number_twice": lambda: patch.object(StepQueue, "open", number_twice),
    "forgotten": lambda: patch.object(WorkInProgress, "oldest_base_after", forgotten),
    "one_more": lambda: patch.object(StepQueue, "may_overlap", property(one_more)),
}


@pytest.mark.parametrize("name", mostly_proof(MUTANTS, ["forgotten", "one_more"]))
def test_a_seeded_bug_is_caught_three_times(name):
    with MUTANTS[name]():
        broken = (seed for seed in range(100) if history(seed).caught)
        assert len(list(islice(broken, 3))) == 3


@pytest.mark.parametrize("seed", CALM)
def test_a_mean_out_of_turn_leaves_a_step_without_its_number(seed):
    """The step can be committed no more: where nobody has left, a cluster falls apart."""
    with patch.object(Cluster, "takes_mean", property(out_of_turn)):
        broken = history(seed, faults=0)
    assert broken.caught or "dissolved" in broken.kinds
    calm = history(seed, faults=0)
    assert calm.violation is None
    assert "dissolved" not in calm.kinds
