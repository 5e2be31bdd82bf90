"""Seeded histories of clusters that train batches of their own and average: every batch is in the result
exactly once.
"""

from collections import Counter
from contextlib import ExitStack
from itertools import islice
from unittest.mock import patch

import pytest

from hetpeer.averaging.effects import COPY, STATE
from hetpeer.averaging.member.step_vote import StepVote
from hetpeer.bootstrap.grouped import cluster_events
from hetpeer.bootstrap.grouped.averaging_round import AveragingRound
from hetpeer.bootstrap.grouped.averagings import Averagings
from hetpeer.bootstrap.grouped.cluster import Cluster
from hetpeer.bootstrap.grouped.grouped_run import GroupedRun
from hetpeer.bootstrap.log.batches import BatchLineage
from hetpeer.bootstrap.log.credit import Credit
from hetpeer.bootstrap.state.effects import AT_BARRIER
from tests.amounts import mostly_proof
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import BLOCKS, LAYOUTS, LIMIT_S
from tests.simulation.sim_grouped import GroupedSwarm, simulate

SEEDS = (13, *range(13), *range(14, 24))
"""The first one has a mean that is installed late."""
ONCE_BROKEN = (36, 92, 140, 1730)
"""A copy outlived its averaging; a plan was made and its cluster silenced at once; a checkpoint had a copy of
another cluster's state; what was saved of one cluster's version counted as another's version of the same
number.
"""
FAULTS = 20
OWN_CUTS = (4, 12, 25, 33, 36, 37)
DELAYED = [seed for seed in range(96) if seed // 4 % 2]
SEEDS_OF = {"live": DELAYED, "midway": DELAYED, "hurried": (12, 18, 33, 37, 45, 54)}
"""Histories in which the rule matters, if it does not in all."""


@pytest.mark.parametrize("count", mostly_proof([6, len(SEEDS)], [6]))
def test_histories_with_many_faults_keep_every_invariant(count):
    kinds = set()
    for seed in SEEDS[:count]:
        outcome = simulate(seed, faults=FAULTS)
        assert outcome.violation is None, outcome
        assert outcome.faults >= 14, outcome
        kinds |= outcome.kinds
    assert kinds >= {"founded", "commit", "average", "installed", "dissolved", "checkpoint", "evaluation"}


def test_clusters_with_cuts_of_their_own_average_with_the_others():
    """In one of four histories a planner cuts forming clusters at random, and coordinators die meanwhile."""
    cuts = []

    def write(self, record, original=CheckedSwarm.write):
        cuts.extend([record["layout"]] if record["kind"] == "founded" and "layout" in record else [])
        original(self, record)

    with patch.object(CheckedSwarm, "write", write):
        outcomes = [simulate(seed, faults=FAULTS) for seed in OWN_CUTS]
    assert [outcome.violation for outcome in outcomes] == [None] * len(outcomes)
    assert len(cuts) >= len(OWN_CUTS)
    assert len({len(cut) for cut in cuts}) > 1, "more and fewer stages"


@pytest.mark.parametrize("seed", mostly_proof(ONCE_BROKEN, ONCE_BROKEN[:2]))
def test_seeds_that_once_broke_an_invariant(seed):
    outcome = simulate(seed, faults=FAULTS)
    assert outcome.violation is None, outcome


def test_without_faults_nobody_falls_apart_and_groups_are_formed():
    outcome = simulate(3, faults=0)
    assert outcome.violation is None
    assert "dissolved" not in outcome.kinds
    assert "average" in outcome.kinds


@pytest.mark.parametrize("count", mostly_proof([4, 40], [4]))
def test_sparse_averagings_are_of_all_clusters_with_one_anchor(count):
    """Also with clusters that are founded meanwhile, and coordinators that die."""
    kinds = Counter()
    for seed in range(count):
        outcome = simulate(seed, faults=FAULTS, sparse=True)
        assert outcome.violation is None, outcome
        kinds.update(outcome.kinds)
    assert kinds.keys() >= {"average", "dissolved", "founded", "reign"}, kinds
    assert not kinds["installed"], "what is decided is installed by all at once"


def test_sparse_clusters_wait_for_the_fastest_and_not_for_the_slowest():
    """Who has trained an interval calls the others, which come after their batch."""
    outcome = simulate(3, faults=0, interval=3, sparse=True)
    assert outcome.violation is None
    assert "average" in outcome.kinds
    assert "dissolved" not in outcome.kinds


def of_two_that_come_late(interval, stores_from=0.0):
    """History of one sparse cluster, to which two volunteers come that can form another.

    Nothing is stored before `stores_from`.
    """
    config = HistoryConfig(
        volunteers=4, layouts=LAYOUTS[1][:1], steps=40, microbatches=6, fetch_s=(0.01, 0.05), sparse=True
    )
    swarm = GroupedSwarm(0, config, CheckedSymbols(BLOCKS), Coverage(), interval=interval)

    def saved(self, order, block, digest, now, original=GroupedRun.saved):
        stored = now >= stores_from
        return original(self, order, block, digest, now) if stored else self.not_saved(order, now)

    with ExitStack() as patches:
        patches.enter_context(patch.object(GroupedRun, "saved", saved))
        for peer in ("v2", "v3"):
            volunteer = swarm.volunteers[peer]
            swarm.world.after(6.0, volunteer.start)
            patches.enter_context(patch.object(volunteer, "start", lambda: None))
        swarm.run(LIMIT_S)
    return swarm.log


@pytest.mark.parametrize("interval", [1, 2])
def test_volunteers_that_come_late_become_a_cluster_of_sparse_averagings(interval):
    """Its checkpoint must have the last averaging, and so the next one waits for it."""
    log = of_two_that_come_late(interval)
    founded = [record["cluster"] for record in log if record["kind"] == "founded"]
    assert founded == [0, 1]
    before = log[: next(i for i, one in enumerate(log) if one["kind"] == "founded" and one["cluster"] == 1)]
    assert sum(record["kind"] == "commit" for record in before) < 8


def test_sparse_averagings_do_not_wait_for_a_new_cluster_for_ever():
    """Its checkpoint cannot be stored."""
    with patch.object(cluster_events, "FOUNDING_S", 10.0):
        kinds = [record["kind"] for record in of_two_that_come_late(2, stores_from=60.0)]
    assert kinds.index("checkpoint") > kinds.index("average")
    assert "average" in kinds[kinds.index("average") + 1 : kinds.index("checkpoint")]
    assert kinds.count("founded") == 2


def outdated(self):
    """A cluster is founded from a checkpoint of before the last averaging."""
    return True


def forgetful(self, record, original=BatchLineage.add):
    """The batch of a cluster that falls apart is not handed out again."""
    if record["kind"] == "dissolved":
        self._handed.pop(record["cluster"], None)
    original(self, record)


def alone(self, original=AveragingRound._contributions):
    """A cluster is left out of the sum of one block."""
    sums = original(self)
    return sums | {0: sums[0][:1]}


def anybody(self, original=StepVote._sums):
    """A holder sends its parameters for any cluster that a plan names."""
    slot, ids = original(self)
    return (slot, {b: frozenset((0,)) for b in ids}) if self._averages else (slot, ids)


def live(self, original=StepVote._sums):
    """It is not the copy that is averaged but what has become of it."""
    slot, ids = original(self)
    return (STATE if slot == COPY else slot), ids


def midway(self):
    """A cluster installs a mean while it trains."""
    return True


def at_barriers(self, now):
    """As the original: a step still begins at a barrier only."""
    return self._machine.at_barrier(now) if self.context.state in AT_BARRIER else []


def kept(self, record, original=Credit.add):
    """Work that is lost with a cluster stays credited."""
    if record["kind"] != "dissolved":
        original(self, record)


def hurried(self, cluster, leaving, *, promised=False):
    """Clusters fall apart for others whatever is lost with them."""
    return True


MUTANTS = {
    "hurried": lambda: patch.object(BatchLineage, "are_elsewhere", hurried),
    "kept": lambda: patch.object(Credit, "add", kept),
    "live": lambda: patch.object(StepVote, "_sums", live),
    "midway": lambda: patch.multiple(Cluster, at_rest=property(midway), go_on=at_barriers),
    "forgetful": lambda: patch.object(BatchLineage, "add", forgetful),
    "alone": lambda: patch.object(AveragingRound, "_contributions", alone),
    "anybody": lambda: patch.object(StepVote, "_sums", anybody),
}
OF_SPARSE = {
    "outdated": lambda: patch.object(Averagings, "may_found", property(outdated)),
    "alone": MUTANTS["alone"],
}


@pytest.mark.parametrize("name", mostly_proof(MUTANTS, MUTANTS.keys() - {"live", "midway", "anybody"}))
def test_a_seeded_bug_is_caught_three_times(name):
    with MUTANTS[name]():
        seeds = SEEDS_OF.get(name, range(32))
        broken = (seed for seed in seeds if simulate(seed, faults=FAULTS).caught)
        assert len(list(islice(broken, 3))) == 3


@pytest.mark.parametrize("name", mostly_proof(OF_SPARSE, ["outdated"]))
def test_a_seeded_bug_of_sparse_averagings_is_caught_three_times(name):
    with OF_SPARSE[name]():
        broken = (seed for seed in range(64) if simulate(seed, faults=FAULTS, sparse=True).caught)
        assert len(list(islice(broken, 3))) == 3
