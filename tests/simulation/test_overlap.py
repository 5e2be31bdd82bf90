"""Steps that overlap: what they win when all goes well, and what they must not do when somebody dies.

A seed that breaks an invariant is replayed by `python -m tests.simulation.overlap_histories --seed N --faults
20 --steps 10`.
"""

from dataclasses import replace

import pytest

from hetpeer.averaging.effects import StepId
from hetpeer.bootstrap.log.history import History
from hetpeer.stages.pipeline.pipeline import Pipeline
from tests.amounts import mostly_proof
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import BLOCKS
from tests.simulation.overlap_histories import simulate

THREE_STAGES = HistoryConfig(
    volunteers=6,
    layouts=(((0, 1), (1, 2), (2, BLOCKS)),),
    steps=24,
    microbatches=6,
    evaluate_every=100,
    checkpoint_every=4,
    staleness=2,
    duplicates=0.0,
)

MOMENTS = {"tell sealed": 17, "tell vote": 11, "tell applied": 11, "record commit": 2, "tell ready": 2}
"""Moment → a volunteer dies each n-th time that it comes."""
DEATHS = 8
FAULTS, STEPS = 20, 10
"""Faults and steps of a history."""
WITH_HEAD_START = (*range(8), *range(16, 24))
"""Seeds of histories in which only the first microbatches of a step are computed with older parameters."""
WITH_FRESH_STEPS = (20, 21, 30, 31)
"""Seeds of histories whose first two or three steps do not overlap."""


FEW = (38, 44)
MANY = [(first, first + 100) for first in (4, 104)]
"""First seed and the one after the last."""


@pytest.mark.parametrize(("first", "end"), mostly_proof([FEW, *MANY], [FEW]))
def test_histories_in_which_steps_overlap_keep_every_invariant(first, end):
    """In every other one clusters are founded, fall apart and average, one in twenty with delay.

    A history may end before two steps have met, if faults come at each. `make proof-async` has two thousand.
    """
    kinds, overlapped = set(), 0
    for seed in range(first, end):
        outcome = simulate(seed, Coverage(), faults=FAULTS, steps=STEPS)
        assert outcome.violation is None, outcome
        assert outcome.faults >= 14, outcome
        overlapped += outcome.overlapped > 0
        kinds |= outcome.kinds
    assert overlapped >= 0.98 * (end - first)
    assert kinds >= {"founded", "commit", "average", "installed", "dissolved", "checkpoint", "rollback"}


@pytest.mark.parametrize(
    ("owner", "rule", "broken"),
    [
        (Pipeline, "_in_time", lambda _self, _key: True),
        (StepId, "version_of", lambda self, _microbatch, _block: self.base),
    ],
    ids=["late ones do not wait", "late ones are said to be of the old version"],
)
def test_a_seeded_bug_of_the_head_start_is_caught_three_times(monkeypatch, owner, rule, broken):
    monkeypatch.setattr(owner, rule, broken)
    outcomes = (simulate(seed, Coverage(), faults=FAULTS, steps=STEPS) for seed in WITH_HEAD_START)
    caught = [outcome.seed for outcome in outcomes if outcome.violation is not None]
    assert len(caught) >= 3, caught


def test_steps_that_overlap_sooner_than_they_may_are_caught(monkeypatch):
    settings = HistoryConfig.coordinator
    monkeypatch.setattr(HistoryConfig, "coordinator", lambda *args: replace(settings(*args), fresh_steps=0))
    outcomes = (simulate(seed, Coverage(), faults=FAULTS, steps=STEPS) for seed in WITH_FRESH_STEPS)
    found = [outcome.violation or "" for outcome in outcomes]
    assert all("updates behind" in violation for violation in found), found


class Deaths:
    """Kills one volunteer after another at each n-th `moment`; each is back two seconds later."""

    def __init__(self, swarm, moment, every):
        self.count = 0
        self._swarm, self._moment, self._every = swarm, moment, every
        self._seen = 0
        swarm.hooks.append(self._happened)

    def _happened(self, what):
        if what != self._moment or self.count == DEATHS:
            return
        self._seen += 1
        if self._seen % self._every == 0:
            names = sorted(self._swarm.volunteers)
            victim = self._swarm.volunteers[names[self.count % len(names)]]
            if victim.alive:
                self.count += 1
                self._swarm.world.after(0.0, victim.kill)
                self._swarm.world.after(2.0, victim.start)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_death_hangs_neither_the_pipeline_nor_the_reduce(moment):
    """In ravnest it does: neighbours in the pipeline and in the ring wait for a dead peer for ever."""
    swarm = CheckedSwarm(1, THREE_STAGES, CheckedSymbols(BLOCKS), Coverage())
    deaths = Deaths(swarm, moment, MOMENTS[moment])
    swarm.run(2000.0)
    assert deaths.count >= 3
    assert swarm.completed


@pytest.mark.parametrize("seed", range(3))
def test_nobody_waits_for_a_pipeline_to_fill_and_drain(seed):
    """The same swarm, all of whose members stay: steps follow one another faster, by what filling, reducing
    and deciding took.
    """
    seconds = {}
    for staleness in (0, 1, 2):
        config = replace(THREE_STAGES, volunteers=3, staleness=staleness, latency_s=(0.05, 0.05))
        swarm = CheckedSwarm(seed, config, CheckedSymbols(BLOCKS), Coverage())
        times = []
        swarm.hooks.append(
            lambda what, swarm=swarm, times=times: (
                times.append(swarm.world.now) if what == "record commit" else None
            )
        )
        swarm.run(2000.0)
        seconds[staleness] = (times[-1] - times[8]) / (len(times) - 9)
        commits = History.of(swarm.log).commits
        assert commits[20].get("behind", 0) == staleness
    assert seconds[1] < 0.85 * seconds[0]
    assert seconds[2] < 1.05 * seconds[1]
