"""Backups are arranged, die, and step in for holders that die, in each phase of a step."""

from dataclasses import replace
from itertools import islice, starmap
from unittest.mock import patch

import pytest

from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.coordinator.step_barrier import StepBarrier
from tests.amounts import mostly_proof
from tests.simulation.arrangements import PROMISE, Arrangements
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import LAYOUTS, shape, simulate
from tests.simulation.lying_swarms import BLOCKS, said

HALVES = LAYOUTS[1][0]
LETS_IN = StepBarrier.lets_in
CONFIG = HistoryConfig(volunteers=4, layouts=LAYOUTS[1], steps=16, checkpoint_every=10, fetch_s=(0.01, 0.05))
LONG = replace(CONFIG, microbatches=12)
"""Steps are long beside a fetch, so backups have the version of the step that runs."""
ARRANGED, STRUCK = 3, 13
"""Commits after which the second pipeline becomes backups, and something happens."""


def pipelines(swarm: CheckedSwarm) -> tuple[list[str], list[str]]:
    """Volunteers of one complete pipeline, and of another."""
    volunteers = swarm.coordinator.members.volunteers.values()
    by_place = {place: [v.peer for v in volunteers if v.place == place] for place in HALVES}
    return [peers[0] for peers in by_place.values()], [peers[1] for peers in by_place.values()]


def played(config: HistoryConfig, seed: int, moment: str, act) -> CheckedSwarm:
    """A run with two holders and two backups; `act(swarm, holders, backups)` comes at the next `moment`
    after STRUCK commits.
    """
    swarm = CheckedSwarm(seed, config, CheckedSymbols(BLOCKS), Coverage())
    done, sides = 0, None

    def hook(what: str) -> None:
        nonlocal done, sides
        done += what == "record commit"
        if done == ARRANGED and sides is None:
            sides = holders, backups = pipelines(swarm)
            seats = {peer: (0, place) for peer, place in zip(holders, HALVES, strict=True)}
            seats |= {peer: (1, place) for peer, place in zip(backups, HALVES, strict=True)}
            swarm.arrange(Arrangement((HALVES, HALVES), seats, PROMISE, frozenset(backups)))
        if done >= STRUCK and what == moment:
            swarm.hooks.remove(hook)
            assert sides is not None
            swarm.world.after(0.01, lambda: act(swarm, *sides))

    swarm.hooks.append(hook)
    swarm.run(3000.0)
    assert hook not in swarm.hooks
    assert said(swarm, "arranged")[0]["backups"]
    return swarm


def kill(swarm: CheckedSwarm, holders, _backups) -> None:
    swarm.volunteers[holders[1]].kill()


def again(swarm: CheckedSwarm) -> int:
    """Committed steps that were done again."""
    return len(said(swarm, "commit")) - swarm.config.steps


def steps_in(swarm: CheckedSwarm) -> list[str]:
    """Backups that stepped in, in order."""
    return [peer for record in said(swarm, "backups") for peer in record["steps_in"]]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("seed", mostly_proof(range(12), range(2)))
def test_a_backup_that_has_the_version_steps_in_and_no_step_is_lost(seed, staleness) -> None:
    """Somebody has counted something, so the step has run for a while."""
    swarm = played(replace(LONG, staleness=staleness), seed, "tell sealed", kill)
    assert len(steps_in(swarm)) == 1
    assert again(swarm) == 0


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("moment", ["record commit", "tell vote", "tell applied"])
@pytest.mark.parametrize("seed", mostly_proof(range(12), range(1)))
def test_where_nobody_else_has_the_version_yet_the_run_goes_back(seed, moment, staleness) -> None:
    """No further than to the checkpoint, which the backup has; or nothing is lost, if that was stored."""
    swarm = played(replace(LONG, staleness=staleness), seed, moment, kill)
    assert len(steps_in(swarm)) == 1
    assert again(swarm) <= STRUCK + 1 - CONFIG.checkpoint_every


@pytest.mark.parametrize("seed", mostly_proof(range(12), range(2)))
def test_states_that_take_long_beside_a_step_are_fetched_from_the_checkpoint_alone(seed) -> None:
    """So volunteers send nothing for backups; the one that steps in has the version to go back to."""
    asked: list[tuple[int, int, bool]] = []

    def look(swarm: CheckedSwarm, holders, backups) -> None:
        core = swarm.coordinator
        asked.extend(
            (core.history.checkpoint_version, core.members.volunteers[peer].warm[0], core.history.stored)
            for peer in backups
        )
        kill(swarm, holders, backups)

    swarm = played(replace(CONFIG, fetch_s=(0.5, 1.0)), seed, "tell sealed", look)
    assert [(kept, stored) for _, kept, stored in asked] == [(asked[0][0], False)] * 2
    assert len(steps_in(swarm)) == 1
    (back,) = said(swarm, "rollback")
    assert back["to_version"] == asked[0][0]


@pytest.mark.parametrize("seed", mostly_proof(range(6), range(2)))
def test_no_step_notices_the_death_of_a_backup(seed) -> None:
    def die(swarm: CheckedSwarm, _holders, backups) -> None:
        for name in backups:
            swarm.volunteers[name].kill()

    swarm = played(LONG, seed, "tell sealed", die)
    assert len(said(swarm, "gone")) == 2
    assert not said(swarm, "rollback")
    assert not steps_in(swarm)


@pytest.mark.parametrize("seed", mostly_proof(range(6), range(2)))
def test_the_next_coordinator_knows_the_backups(seed) -> None:
    def crash(swarm: CheckedSwarm, _holders, _backups) -> None:
        swarm.crash_coordinator(3.0)

    swarm = played(LONG, seed, "record commit", crash)
    assert len(said(swarm, "reign")) == 2
    assert not steps_in(swarm)
    assert again(swarm) == 0


class Mortality:
    """Kills one or two volunteers of `swarm` every few seconds, and at times the coordinator."""

    def __init__(self, swarm: CheckedSwarm) -> None:
        self._swarm = swarm
        swarm.world.after(8.0, self._strike)

    def _strike(self) -> None:
        swarm, random = self._swarm, self._swarm.world.random
        alive = [v for v in swarm.volunteers.values() if v.alive]
        if swarm.completed is not None or not alive:
            return
        for victim in random.sample(alive, min(len(alive), random.choice((1, 1, 2)))):
            victim.kill()
            swarm.world.after(random.choice((0.5, 4.0, 12.0)), victim.start)
        if random.random() < 0.1:
            swarm.crash_coordinator(random.uniform(0.5, 15.0))
        swarm.world.after(random.uniform(2.0, 14.0), self._strike)


@pytest.mark.parametrize("seeds", mostly_proof((range(4), range(4, 60)), (range(4),)))
def test_histories_in_which_holders_and_backups_die_keep_every_invariant(seeds: range) -> None:
    """Every few seconds others become backups, and somebody dies; some of them step in."""
    stepped = []
    for seed in seeds:
        config = replace(shape(seed), volunteers=7, steps=30)
        swarm = CheckedSwarm(seed, config, CheckedSymbols(BLOCKS), Coverage())
        Arrangements(swarm, seed, 5.0)
        Mortality(swarm)
        swarm.run(3000.0)
        stepped += steps_in(swarm)
    assert len(stepped) >= len(seeds)


def let_in(self: StepBarrier, *args) -> bool:
    """A backup that is ready is let in as anybody else."""
    members = self._context.members
    backups, members.backups = members.backups, frozenset()
    try:
        return LETS_IN(self, *args)
    finally:
        members.backups = backups


def test_a_backup_that_works_is_caught_three_times() -> None:
    """In random histories, in which volunteers become backups every few seconds."""
    with patch.object(StepBarrier, "lets_in", let_in):
        shapes = ((seed, replace(shape(seed), arranged_s=5.0)) for seed in range(20))
        broken = (one for one in starmap(played_at_random, shapes) if "has backups in its roster" in one)
        assert len(list(islice(broken, 3))) == 3


def played_at_random(seed: int, config: HistoryConfig) -> str:
    """The invariant that a random history breaks; empty if it breaks none."""
    return simulate(seed, Coverage(), config=config).violation or ""
