"""A cluster that has lost a block goes back to its own checkpoint: no batch is lost or doubled, and it does
not dissolve while there is somewhere to go back to (docs/grouped.md, "Going back").
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from unittest.mock import patch

import pytest

from hetpeer.bootstrap.grouped.cluster import Cluster
from hetpeer.bootstrap.log.batches import BatchLineage
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.lineage import lineage
from tests.amounts import mostly_proof
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import BLOCKS, LAYOUTS, HistoryOutcome, shape
from tests.simulation.sim_grouped import GroupedSwarm, simulate

LIMIT_S = 3000.0
KILLS, KILL_S = 10, 8.0
LAYOUT = LAYOUTS[4][:1]
"""Four stages of one block."""
ALONE = HistoryConfig(
    volunteers=5, layouts=LAYOUT, steps=40, microbatches=6, checkpoint_every=4, fetch_s=(0.01, 0.05)
)
"""One cluster, and one volunteer that can only be a replica."""


def log_of(seed: int, act: Callable[[GroupedSwarm], None], config: HistoryConfig = ALONE) -> list[Record]:
    """Log of a finished run in which `act` came at the sixth commit."""
    swarm, commits = GroupedSwarm(seed, config, CheckedSymbols(BLOCKS), Coverage()), 0

    def hook(what: str) -> None:
        nonlocal commits
        commits += what == "record commit"
        if commits == 6:
            swarm.hooks.remove(hook)
            swarm.world.after(0.01, lambda: act(swarm))

    swarm.hooks.append(hook)
    swarm.run(LIMIT_S)
    assert hook not in swarm.hooks
    return swarm.log


def only_holder(swarm: GroupedSwarm) -> str:
    """A volunteer whose block nobody else holds."""
    assert swarm.coordinator is not None
    [cluster] = swarm.coordinator.clusters.living
    roster = cluster.members.roster()
    return next(p for p, place in sorted(roster.items()) if list(roster.values()).count(place) == 1)


def kill(swarm: GroupedSwarm, back_s: float | None) -> None:
    """Kill the only holder of a block. It is back after `back_s` without its state, or never (None)."""
    victim = swarm.volunteers[only_holder(swarm)]
    victim.kill()
    if back_s is not None:
        swarm.world.after(back_s, victim.start)


def goes_back(log: list[Record]) -> list[Record]:
    """Records of `log` by which a cluster goes back to a checkpoint."""
    versions: Counter[int] = Counter()
    found = []
    for record in log:
        cluster = record.get("cluster", 0)
        match record["kind"]:
            case "commit":
                versions[cluster] = record["step"] + 1
            case "average" | "installed":
                versions.update({one: step + 1 - versions[one] for one, step in record["installed"]})
            case "rollback" if record["to_version"] < versions[cluster]:
                versions[cluster] = record["to_version"]
                found.append(record)
            case _:
                pass
    return found


@pytest.mark.parametrize("back_s", [1.0, 4.0, None])
def test_the_only_cluster_goes_back_when_a_blocks_only_holder_dies(back_s: float | None):
    """Also if it never comes back: then the replica moves to its place."""
    for seed in range(4):
        log = log_of(seed, partial(kill, back_s=back_s))
        (back,) = goes_back(log)
        stored = [r for r in log[: log.index(back)] if r["kind"] == "checkpoint"]
        assert back["to_version"] == stored[-1]["version"]
        assert not [record for record in log if record["kind"] == "dissolved"]
        made_of = [one["batch"] for one in lineage(log).records if one["kind"] == "commit"]
        assert sorted(made_of) == list(range(ALONE.steps))


def test_a_cluster_with_nobody_left_for_a_block_dissolves_after_it_has_gone_back():
    """Its volunteers are divided anew, and nothing is lost by it."""
    config = replace(ALONE, volunteers=4)
    swarm = GroupedSwarm(0, config, CheckedSymbols(BLOCKS), Coverage())
    killed = False

    def hook(what: str) -> None:
        nonlocal killed
        if what == "record commit" and not killed:
            killed = True
            swarm.world.after(0.01, lambda: kill(swarm, 90.0))

    swarm.hooks.append(hook)
    swarm.run(LIMIT_S)
    kinds = [record["kind"] for record in swarm.log]
    assert kinds.index("rollback") < kinds.index("dissolved")
    between = kinds[kinds.index("rollback") : kinds.index("dissolved")]
    assert "commit" not in between


def is_alone(seed: int) -> bool:
    """Whether the history of `seed` has one cluster, and one volunteer more, and nothing but kills."""
    return seed % 3 > 0


def history(seed: int) -> HistoryOutcome:
    """Ten kills of one cluster and its replica, or of two clusters beside two other faults.

    The one has three or four stages, so that those that wait are too few for a second one.
    """
    alone = is_alone(seed)
    layouts = (LAYOUTS[3:] if alone else LAYOUTS[1:3])[seed // 2 % 2][:1]
    stages = len(layouts[0])
    config = replace(
        shape(seed),
        steps=30,
        volunteers=stages + 1 if alone else 2 * stages,
        layouts=layouts,
        latency_s=(0.005, 0.05),
        checkpoint_every=2 + seed % 4,
        staleness=seed // 2 % 2,
        arranged_s=0.0,
    )
    how = {"faults": 0, "delayed": False} if alone else {"faults": 2}
    return simulate(seed, config=config, interval=2, kills=KILLS, kill_s=KILL_S, **how)


def is_caught(seed: int) -> bool:
    """Whether an invariant is broken, or the only cluster dissolved."""
    outcome = history(seed)
    return outcome.caught or (is_alone(seed) and "dissolved" in outcome.kinds)


@pytest.mark.parametrize("seeds", mostly_proof([range(8), range(8, 108), range(108, 208)], [range(8)]))
def test_histories_of_kills_keep_every_invariant_and_the_only_cluster_stands(seeds: range):
    gone_back = 0

    def write(self: CheckedSwarm, record: dict, original=CheckedSwarm.write) -> None:
        nonlocal gone_back
        gone_back += record["kind"] == "rollback"
        original(self, record)

    with patch.object(CheckedSwarm, "write", write):
        for seed in seeds:
            outcome = history(seed)
            assert outcome.violation is None, outcome
            assert not is_alone(seed) or "dissolved" not in outcome.kinds, outcome
    assert gone_back >= 2 * len(seeds)


# ── seeded bugs ─────────────────────────────────────────────────────────────────────────────────────────────


def keeps_its_batches(self, cluster, version):
    """Batches that came after the checkpoint stay in the cluster's books."""
    for handed in self._handed.pop(cluster, ()):
        self.hand_back(cluster, handed)


def to_any_checkpoint(self):
    """A cluster goes back to the last checkpoint, whosever it is."""
    return self.history.checkpoint_version


def never(self):
    """A cluster dissolves, though it has a checkpoint."""
    return


MUTANTS: dict[str, Callable[[], AbstractContextManager]] = {
    "keeps_its_batches": lambda: patch.object(BatchLineage, "_go_back", keeps_its_batches),
    "never": lambda: patch.object(Cluster, "goes_back_to", never),
    "to_any_checkpoint": lambda: patch.object(Cluster, "goes_back_to", to_any_checkpoint),
}


@pytest.mark.parametrize("name", mostly_proof(MUTANTS, ["keeps_its_batches"]))
def test_a_seeded_bug_is_caught_three_times(name: str):
    with MUTANTS[name]():
        broken = (seed for seed in range(96) if is_caught(seed))
        assert len(list(islice(broken, 3))) == 3
