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


async def spared(swarm: Swarm, steps: int, fail: str = "") -> tuple[Child, list[Child], list[Child]]:
    """The bootstrap node, two holders at work, and two backups, in a run of so many steps."""
    training = swarm.run.manifest.training.model_copy(update={"steps": steps})
    swarm.run = resign(swarm.run, training=training)
    bootstrap = await swarm.bootstrap(*EVENLY, together=4, before="spares_one_pipeline", fail=fail)
    volunteers = [swarm.volunteer(name) for name in "abcd"]
    arranged: dict[str, Any] = await until(
        lambda: next(iter(swarm.records("arranged")), None), lambda: f"backups; {swarm.voices()}", 150.0
    )
    backups = [child for child in volunteers if child.peer_id in arranged["backups"]]
    holders = [child for child in volunteers if child not in backups]
    assert len(backups) == len(holders) == 2
    return bootstrap, holders, backups


def worked(swarm: Swarm, since: int) -> set[str]:
    """Volunteers in the rosters of the steps from `since` on, by the log."""
    known: list[str] = []
    found = set()
    for record in swarm.records("commit"):
        known += record.get("newcomers", ())
        found |= {known[number] for number in record["held"][::3]} if record["step"] >= since else set()
    return found


def steps_in(swarm: Swarm) -> list[str]:
    """Backups that stepped in, in order."""
    return [peer for record in swarm.records("backups") for peer in record["steps_in"]]


async def test_a_backup_steps_in_for_a_holder_that_is_killed(swarm: Swarm) -> None:
    bootstrap, (one, other), backups = await spared(swarm, 100_000)
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
async def test_the_next_coordinator_knows_the_backups_and_one_that_dies_is_not_missed(swarm: Swarm) -> None:
    _, holders, (one, other) = await spared(swarm, 50, fail="recorded_checkpoint:3")
    await until(lambda: swarm.deaths == 1, "the coordinator has died", 200.0)
    since = swarm.version
    bootstrap = await swarm.bootstrap(*EVENLY, before="spares_one_pipeline")
    one.signal(signal.SIGKILL)
    await swarm.finished(bootstrap, *holders, other)
    assert worked(swarm, since + 1) == {child.peer_id for child in holders}
    assert not swarm.records("rollback")
    swarm.exact()
