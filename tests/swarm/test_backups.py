"""Backups in a swarm of real processes: they rest, step in for a holder that is killed, and the curve stays
that of one machine.
"""

import signal
from typing import Any

import pytest

from tests.swarm.child import Child, until
from tests.swarm.swarm import Swarm, resign

EVENLY = ("--placement", "holders")
"""Four volunteers make two pipelines."""

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


async def spared(
    swarm: Swarm, fail: str = "", before: str = "", **training: int
) -> tuple[Child, list[Child], list[Child]]:
    """The bootstrap node, two holders at work, and two backups; `training`: changed settings of the run.

    `before` is, as in `Swarm.start`, what is wrong with the volunteers.
    """
    swarm.run = resign(swarm.run, training=swarm.run.manifest.training.model_copy(update=training))
    bootstrap = await swarm.bootstrap(*EVENLY, together=4, before="spares_one_pipeline", fail=fail)
    volunteers = [swarm.volunteer(name, before=before) for name in "abcd"]
    arranged: dict[str, Any] = await until(
        lambda: next(iter(swarm.records("arranged")), None), lambda: f"backups; {swarm.voices()}", 150.0
    )
    backups = [child for child in volunteers if child.peer_id in arranged["backups"]]
    holders = [child for child in volunteers if child not in backups]
    assert len(backups) == len(holders) == 2
    return bootstrap, holders, backups


def rosters(swarm: Swarm) -> dict[int, set[str]]:
    """Step of the present history → the volunteers in its roster, by the log."""
    known: list[str] = []
    found: dict[int, set[str]] = {}
    for record in swarm.records():
        if record["kind"] == "commit":
            known += record.get("newcomers", ())
            found[record["step"]] = {known[number] for number in record["held"][::3]}
        elif record["kind"] == "rollback":
            found = {step: roster for step, roster in found.items() if step < record["to_version"]}
    return found


def worked(swarm: Swarm, since: int) -> set[str]:
    """Volunteers in the rosters of the steps from `since` on."""
    return set().union(*(roster for step, roster in rosters(swarm).items() if step >= since))


def steps_in(swarm: Swarm) -> list[str]:
    """Backups that stepped in, in order."""
    return [peer for record in swarm.records("backups") for peer in record["steps_in"]]


async def test_a_backup_steps_in_for_a_holder_that_is_killed(swarm: Swarm) -> None:
    bootstrap, (one, other), backups = await spared(swarm, steps=100_000)
    look = swarm.start("look", "status", "--watch", "--json", "--bootstrap", swarm.address)
    since = swarm.version
    await swarm.committed(since + 3)
    assert worked(swarm, since + 1) == {one.peer_id, other.peer_id}

    def seen() -> dict[str, int]:
        """Backups by `status`, and the versions that they hold."""
        return {row["peer"]: row["step"] for row in look.shown.get("peers", ()) if row["state"] == "backup"}

    def warm() -> bool:
        found = seen()
        return found.keys() == {child.peer_id for child in backups} and min(found.values()) > since

    await until(warm, lambda: f"they fetch later checkpoints: {seen()}", 100.0)
    look.signal(signal.SIGTERM)
    one.signal(signal.SIGKILL)
    await swarm.gone(one)
    await until(lambda: steps_in(swarm), "a backup steps in", 60.0)
    (stepped,) = steps_in(swarm)
    assert stepped in {child.peer_id for child in backups}
    await bootstrap.says("from now on a backup works")
    await until(lambda: stepped in worked(swarm, since), "it works", 100.0)
    since = swarm.version
    await swarm.committed(since + 3)
    assert worked(swarm, since + 1) == {other.peer_id, stepped}
    await swarm.left_in_order([other, *backups])
    swarm.exact_so_far()


@pytest.mark.proof
async def test_a_backup_that_has_the_version_enters_the_step_in_which_the_only_holder_is_killed(
    swarm: Swarm,
) -> None:
    """Steps take long beside a fetch, so backups fetch the version of the step that runs; none is lost."""
    slow = "slow_device:0.7"
    _, holders, backups = await spared(swarm, before=slow, steps=100_000, checkpoint_every=3)
    look = swarm.start("look", "status", "--watch", "--json", "--bootstrap", swarm.address)

    def running() -> int | None:
        """The version of the running step, if both backups have it and it is in no checkpoint."""
        rows = [row for row in look.shown.get("peers", ()) if row["state"] == "backup"]
        stored = max((record["version"] for record in swarm.records("checkpoint")), default=0)
        version = swarm.version
        known = [row["step"] for row in rows] == [version] * len(backups)
        return version if known and stored < version else None

    await until(running, lambda: f"backups have the version: {look.shown.get('peers')}", 300.0)
    version, killed = swarm.version, holders[0]
    killed.signal(signal.SIGKILL)
    look.signal(signal.SIGTERM)
    await swarm.gone(killed)
    await swarm.committed(version + 2)
    (stepped,) = steps_in(swarm)
    assert not swarm.records("rollback")
    assert rosters(swarm)[version] == {holders[1].peer_id, stepped}
    await swarm.left_in_order([holders[1], *backups])
    swarm.exact_so_far()


@pytest.mark.proof
async def test_the_next_coordinator_knows_the_backups_and_one_that_dies_is_not_missed(swarm: Swarm) -> None:
    _, holders, (one, other) = await spared(swarm, fail="recorded_checkpoint:3", steps=50)
    await until(lambda: swarm.deaths == 1, "the coordinator has died", 200.0)
    since = swarm.version
    bootstrap = await swarm.bootstrap(*EVENLY, before="spares_one_pipeline")
    one.signal(signal.SIGKILL)
    await swarm.finished(bootstrap, *holders, other)
    assert worked(swarm, since + 1) == {child.peer_id for child in holders}
    assert not swarm.records("rollback")
    swarm.exact()
