"""Staleness by stage: later stages compute with newer parameters, and wait for those that are still to come.

A seed that breaks an invariant is replayed by `python -m tests.simulation.overlap_histories --by-stage --seed
N --faults 20 --steps 10`.
"""

from dataclasses import replace
from itertools import islice, pairwise
from unittest.mock import patch

import pytest

from hetpeer.averaging.effects import StepId
from hetpeer.peer.simulate.sim_hooks import ViolationError
from hetpeer.peer.transport.uplink import PoolNumbers, pool_at
from hetpeer.stages.pipeline.pipeline import Pipeline
from hetpeer.stages.pipeline.schedule_1f1b import WorkerQueue
from tests.amounts import mostly_proof
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.coverage import Coverage
from tests.simulation.histories import BLOCKS
from tests.simulation.lying_swarms import history as checked_history
from tests.simulation.lying_swarms import said
from tests.simulation.overlap_histories import simulate
from tests.simulation.test_overlap import FAULTS, STEPS, THREE_STAGES, Deaths
from tests.simulation.test_spotchecks import TWO_STAGES

FEW = (4, 14)
MANY = [(first, first + 100) for first in (14, 114)]
"""First seed and the one after the last."""
TO_NONE, TO_ONE = ((0, 2), (1, 1), (2, 0)), ((0, 2), (1, 2), (2, 1))
"""(first block, most versions behind) of three stages."""
STALL_S = 300.0
"""Seconds after which the coordinator hands out again what nobody reports. A death may lose a gradient, which
nothing else repairs: so one such time at a step is no wonder, with any staleness.
"""


@pytest.mark.parametrize(("first", "end"), mostly_proof([FEW, *MANY], [FEW]))
def test_histories_with_staleness_by_stage_keep_every_invariant(first, end):
    """In every other one there are clusters; two of three have links with room for one or two bundles."""
    kinds, overlapped = set(), 0
    for seed in range(first, end):
        outcome = simulate(seed, Coverage(), faults=FAULTS, steps=STEPS, by_stage=True)
        assert outcome.violation is None, outcome
        assert outcome.faults >= 14, outcome
        overlapped += outcome.overlapped > 0
        kinds |= outcome.kinds
    assert overlapped >= 0.9 * (end - first)
    assert kinds >= {"founded", "commit", "dissolved", "checkpoint", "rollback"}


def for_the_first_block(self, key):
    return self._missing <= self._delays.behind(self._behind, key.id, key.begin)


WRONG = {
    "later stages do not wait": (Pipeline, "_in_time", lambda _self, _key: True),
    "all stages use the oldest version": (StepId, "version_of", lambda self, _microbatch, _block: self.base),
    "a place of two stages waits for the older version": (Pipeline, "_in_time", for_the_first_block),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_seeded_bug_in_the_versions_is_caught_three_times(name):
    with patch.object(*WRONG[name]):
        outcomes = (simulate(s, Coverage(), faults=FAULTS, steps=STEPS, by_stage=True) for s in range(40))
        caught = list(islice((one.seed for one in outcomes if one.violation is not None), 3))
    assert len(caught) == 3, caught


def slowest_step_s(seed, stages, frames):
    """Most seconds between two commits while holders die; infinite if it does not end."""
    config = replace(
        THREE_STAGES,
        volunteers=6,
        stage_staleness=stages,
        granted_frames=frames,
        latency_s=(0.02, 0.12),
        microbatches=8,
        stall_s=STALL_S,
        steps=16,
    )
    swarm = CheckedSwarm(seed, config, CheckedSymbols(BLOCKS), Coverage())
    deaths, times = Deaths(swarm, "tell sealed", 11 + seed % 7), [0.0]
    swarm.hooks.append(lambda what: times.append(swarm.world.now) if what == "record commit" else None)
    try:
        swarm.run(6 * STALL_S)
    except ViolationError as error:
        assert "liveness" in str(error), error
        return float("inf")
    assert deaths.count >= 3
    return max(after - before for before, after in pairwise(times))


@pytest.mark.parametrize("frames", [0, 1])
@pytest.mark.parametrize("stages", [TO_NONE, TO_ONE], ids=["2 to 0", "2 to 1"])
def test_no_step_waits_for_a_younger_one_that_waits_for_it(stages, frames):
    """Ids of an older step that are handed out again after a death find room at every holder."""
    for seed in range(4):
        assert slowest_step_s(seed, stages, frames) < 1.5 * STALL_S, seed


def in_all_steps(self, _step, reach):
    """Forwards of younger steps take the room of an older one, for which they wait."""
    return sum(one.in_flight(reach) for one in self._steps) < self._window.depth(reach.hops_after)


STUCK = {
    "one window": (0, (WorkerQueue, "may_begin", in_all_steps)),
    "one set of pools": (1, (PoolNumbers, "of", lambda _self, blocks_left, _step: pool_at(blocks_left))),
}


@pytest.mark.parametrize("name", STUCK)
def test_steps_that_share_their_room_stand_still(name):
    frames, bug = STUCK[name]
    with patch.object(*bug):
        found = (seed for seed in range(8) if slowest_step_s(seed, TO_NONE, frames) > 1.5 * STALL_S)
        stuck = list(islice(found, 3))
    assert len(stuck) == 3, stuck


@pytest.mark.parametrize("seed", mostly_proof(range(6), range(2)))
def test_what_is_computed_a_second_time_uses_the_same_versions(seed):
    """Honest volunteers come and go, and nobody is accused of anything."""
    bounds = ((0, 1), (TWO_STAGES.layouts[0][1][0], 0))
    config = replace(TWO_STAGES, staleness=1, stage_staleness=bounds, granted_frames=2 * (seed % 3 == 0))
    swarm = checked_history(config, seed, faults=10)
    assert not said(swarm, "banned")
    assert not said(swarm, "dispute")


def step_s(stages, staleness=2):
    """Seconds of a step of three volunteers that stay."""
    config = replace(
        THREE_STAGES, volunteers=3, staleness=staleness, stage_staleness=stages, latency_s=(0.05, 0.05)
    )
    swarm, times = CheckedSwarm(1, config, CheckedSymbols(BLOCKS), Coverage()), []
    swarm.hooks.append(lambda what: times.append(swarm.world.now) if what == "record commit" else None)
    swarm.run(2000.0)
    return (times[-1] - times[8]) / (len(times) - 9)


def test_a_last_stage_without_staleness_costs_time_and_one_that_is_one_behind_hardly_any():
    everywhere = step_s(())
    assert step_s(TO_ONE) < 1.1 * everywhere
    assert step_s(TO_NONE) > 1.2 * everywhere
    assert step_s(TO_NONE) < 1.02 * step_s((), staleness=0), "no slower than one step after the other"


def test_a_checkpoint_that_another_cluster_overtakes_is_completed_all_the_same() -> None:
    """A volunteer leaves another cluster, which then stores its state, too, before the first is done."""
    outcome = simulate(1231, Coverage(), faults=20, by_stage=True)
    assert outcome.violation is None
