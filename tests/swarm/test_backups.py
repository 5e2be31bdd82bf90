"""Backups in a swarm of real processes: they rest, step in for a holder that is killed, and the curve stays
that of one machine.
"""

import signal
from typing import Any

import pytest

from tests.swarm.child import Child, until
from tests.swarm.swarm import Swarm, resign

STEPS = 120
"""So many that `status` has looked before the run is over."""

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


async def spared(swarm: Swarm, fail: str = "") -> tuple[Child, list[Child], list[Child]]:
    """The bootstrap node, two holders at work, and two backups, in a run of STEPS steps."""
    training = swarm.run.manifest.training.model_copy(update={"steps": STEPS})
    swarm.run = resign(swarm.run, training=training)
    bootstrap = await swarm.bootstrap(together=4, before="spares_one_pipeline", fail=fail)
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


async def test_a_backup_steps_in_for_a_holder_that_is_killed(swarm: Swarm) -> None:
    bootstrap, (one, other), backups = await spared(swarm)
    look = swarm.start("look", "status", "--watch", "--json", "--bootstrap", swarm.address)
    since = swarm.version
    await swarm.committed(since + 3)
    assert worked(swarm, since + 1) == {one.peer_id, other.peer_id}

    def seen() -> set[str]:
        return {row["peer"] for row in look.shown.get("peers", ()) if row["state"] == "backup"}

    await until(lambda: seen() == {child.peer_id for child in backups}, "status names the backups", 60.0)
    look.signal(signal.SIGTERM)
    one.signal(signal.SIGKILL)
    await swarm.gone(one)
    await swarm.finished(bootstrap, other, *backups)
    (stepped,) = [peer for record in swarm.records("backups") for peer in record["steps_in"]]
    assert stepped in {child.peer_id for child in backups}
    assert worked(swarm, STEPS - 1) == {other.peer_id, stepped}
    assert "from now on a backup works" in bootstrap.said
    swarm.exact()


@pytest.mark.proof
async def test_the_next_coordinator_knows_the_backups_and_one_that_dies_is_not_missed(swarm: Swarm) -> None:
    _, holders, (one, other) = await spared(swarm, fail="recorded_checkpoint:3")
    await until(lambda: swarm.deaths == 1, "the coordinator has died", 200.0)
    since = swarm.version
    bootstrap = await swarm.bootstrap(before="spares_one_pipeline")
    one.signal(signal.SIGKILL)
    await swarm.finished(bootstrap, *holders, other)
    assert worked(swarm, since + 1) == {child.peer_id for child in holders}
    assert not swarm.records("rollback")
    swarm.exact()
