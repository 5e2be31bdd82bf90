"""Replicas in the clusters of a grouped run: spares come in, holders die, and the cluster trains on."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest

from hetpeer.bootstrap.grouped.averaging_round import AveragingRound
from hetpeer.bootstrap.grouped.cluster import Cluster
from hetpeer.peer.simulate.sim_swarm import COORDINATOR
from tests.amounts import mostly_proof
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import BLOCKS, LAYOUTS, HistoryOutcome, shape
from tests.simulation.sim_grouped import BATCHES, SLOW_S, SPARE_S, GroupedSwarm, simulate

CONFIG = HistoryConfig(
    volunteers=5, layouts=LAYOUTS[1], steps=30, microbatches=12, checkpoint_every=10, fetch_s=(0.01, 0.05)
)
"""Two clusters of two stages, and one volunteer too many."""
LIMIT_S = 3000.0
FAULTS, KILLS = 6, 12

FEW = (0, 6)
MANY = [(first, first + 100) for first in (6, 106, 206)]
"""First seed and the one after the last."""

Act = Callable[[GroupedSwarm], None]


def played(
    seed: int, moment: str, act: Act, *, replicated: bool = True, delayed: bool = False
) -> GroupedSwarm:
    """A finished run; `act(swarm)` came at the first `moment`, or at the first at which a block had two
    holders (`replicated`).
    """
    swarm = GroupedSwarm(seed, CONFIG, CheckedSymbols(BLOCKS), Coverage(), delayed=delayed)

    def hook(what: str) -> None:
        if what == moment and (not replicated or holders(swarm, 2)):
            swarm.hooks.remove(hook)
            swarm.world.after(0.01, lambda: act(swarm))

    swarm.hooks.append(hook)
    swarm.run(LIMIT_S)
    assert hook not in swarm.hooks
    return swarm


def holders(swarm: GroupedSwarm, count: int) -> list[str]:
    """Volunteers whose blocks have so many holders in their cluster."""
    found = []
    for cluster in swarm.coordinator.clusters if swarm.coordinator else ():
        members = cluster.members
        found += [
            peer
            for peer, (begin, end) in members.roster().items()
            if all(len(members.holders(block)) == count for block in range(begin, end))
        ]
    return sorted(found)


def kinds(swarm: GroupedSwarm) -> list[str]:
    return [record["kind"] for record in swarm.log]


def kill_one_of_two(swarm: GroupedSwarm) -> None:
    """It never comes back."""
    swarm.volunteers[holders(swarm, 2)[0]].kill()


def cut_off(swarm: GroupedSwarm, seconds: float) -> None:
    """Cut a block's only holder off from the coordinator, for longer than the grace."""
    name = holders(swarm, 1)[0]
    swarm.network.cut(name, COORDINATOR, seconds)
    swarm.stream_broken(name)
    swarm.world.after(seconds, partial(swarm.stream_resumed, name))


def kill_the_only_one(swarm: GroupedSwarm) -> None:
    swarm.volunteers[holders(swarm, 1)[0]].kill()


def test_a_spare_becomes_a_replica_and_shares_the_work():
    swarm = played(0, "record commit", lambda _swarm: None)
    assert "dissolved" not in kinds(swarm)
    averages = [record for record in swarm.log if record["kind"] == "average"]
    assert {len(record["held"]) for record in averages} >= {5}


def test_a_replica_and_a_volunteer_that_waits_become_a_cluster():
    """The sixth comes when the fifth is a replica."""
    swarm = GroupedSwarm(0, replace(CONFIG, volunteers=6, steps=60), CheckedSymbols(BLOCKS), Coverage())
    sixth = swarm.volunteers["v5"]
    swarm.world.after(9.0, sixth.start)
    with patch.object(sixth, "start", lambda: None):
        swarm.run(LIMIT_S)
    assert kinds(swarm).count("founded") == 3
    assert "dissolved" not in kinds(swarm)
    assert "gone" not in kinds(swarm)
    groups = [record for record in swarm.log if record["kind"] == "average"]
    assert "v5" in {peer for record in groups for _, peer, *_ in record["held"]}


MOMENTS = ("record commit", "tell sealed", "tell vote", "tell applied", "record average")


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_death_that_leaves_a_holder_dissolves_nothing(moment: str, delayed: bool):
    for seed in range(3):
        swarm = played(seed, moment, kill_one_of_two, delayed=delayed)
        assert "gone" in kinds(swarm)
        assert "dissolved" not in kinds(swarm)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cluster_waits_for_its_last_holder(moment: str):
    """Which is cut off for 9 s, is lost after 2 or so, and comes back with its state."""
    lost = 0
    for seed in range(3):
        swarm = played(seed, moment, partial(cut_off, seconds=9.0))
        lost += "gone" in kinds(swarm)
        assert "dissolved" not in kinds(swarm)
    assert lost


def test_a_replica_takes_the_place_of_a_last_holder_that_does_not_come_back():
    """In the cluster's first step, whose state is stored."""
    swarm = played(0, "tell sealed", kill_the_only_one)
    assert "rollback" in kinds(swarm)
    assert "dissolved" not in kinds(swarm)


def test_a_spare_takes_the_place_of_a_dead_holder_whose_state_is_stored():
    """In the cluster's first step; nobody else has the block."""
    swarm = played(0, "tell sealed", kill_the_only_one, replicated=False)
    assert "gone" in kinds(swarm)
    assert "dissolved" not in kinds(swarm)


def history(seed: int) -> HistoryOutcome:
    """One or two volunteers more than two clusters need, and slow averagings after every batch, so that many
    come or die in one. In half of the histories steps overlap.
    """
    shaped = shape(seed)
    volunteers = 2 * len(shaped.layouts[0]) + 1 + seed % 2
    config = replace(
        shaped,
        steps=2 * BATCHES,
        volunteers=volunteers,
        staleness=seed // 2 % 2,
        part_s=(0.0, SLOW_S[seed % len(SLOW_S)]),
    )
    return simulate(seed, faults=FAULTS, config=config, interval=1, spare_s=SPARE_S[0], kills=KILLS)


def held_twice(record: Mapping[str, Any]) -> bool:
    """Whether a commit names two holders of a block."""
    held = record.get("held", ())
    places = [(held[at + 1], held[at + 2]) for at in range(0, len(held), 3)]
    return len(set(places)) < len(places)


@pytest.mark.parametrize(("first", "end"), mostly_proof([FEW, *MANY], [FEW]))
def test_histories_in_which_replicas_come_and_go_keep_every_invariant(first: int, end: int):
    kinds: set[str] = set()
    shared = 0

    def write(self: CheckedSwarm, record: dict[str, Any], original: Any = CheckedSwarm.write) -> None:
        nonlocal shared
        shared += record["kind"] == "commit" and held_twice(record)
        original(self, record)

    with patch.object(CheckedSwarm, "write", write):
        for seed in range(first, end):
            outcome = history(seed)
            assert outcome.violation is None, outcome
            kinds |= outcome.kinds
    assert shared >= 3 * (end - first)
    assert kinds >= {"founded", "commit", "average", "dissolved", "gone"}


# ── seeded bugs ─────────────────────────────────────────────────────────────────────────────────────────────


def nobody_left(self):
    """Members that are lost, or have lost their state, stay in an averaging."""
    return []


def never_torn(self):
    """A cluster that cannot give all blocks stays in an averaging."""
    return []


def for_ever(self, now):
    """A cluster waits for its last holder without end."""
    return


MUTANTS = {
    "nobody_left": lambda: patch.object(AveragingRound, "strike", nobody_left),
    "never_torn": lambda: patch.object(AveragingRound, "torn", property(never_torn)),
    "for_ever": lambda: patch.object(Cluster, "gap_is_final", for_ever),
}


@pytest.mark.parametrize("name", mostly_proof(MUTANTS, ["never_torn"]))
def test_a_seeded_bug_is_caught_three_times(name: str):
    with MUTANTS[name]():
        broken = (seed for seed in range(64) if history(seed).caught)
        assert len(list(islice(broken, 3))) == 3


@pytest.mark.parametrize("seeds", mostly_proof([range(2), range(2, 30)], [range(2)]))
def test_sparse_averagings_are_of_all_clusters_while_blocks_change_hands(seeds):
    """A cluster that lacks a block is waited for; one that misses an averaging does nothing any more."""
    for seed in seeds:
        outcome = simulate(seed, faults=FAULTS, config=CONFIG, sparse=True)
        assert outcome.violation is None, outcome
        assert "average" in outcome.kinds
