"""Data that is not there when it is needed: ids wait for it; if it does not come, the run says what is
missing.
"""

import pytest

from hetpeer.dht.base.errors import ExitCode
from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


async def test_a_shard_that_comes_late_delays_the_run_only(swarm: Swarm) -> None:
    bootstrap = await swarm.bootstrap(before="patient")
    (shard,) = swarm.run.manifest.data.train
    path = swarm.run.data / shard.name
    path.rename(away := swarm.folder / "shard")
    volunteers = [swarm.volunteer(name) for name in ("one", "other")]
    for volunteer in volunteers:
        await volunteer.says(f"fetching data shard {shard.name}")
    assert swarm.version == 0
    away.rename(path)
    await swarm.finished(bootstrap, *volunteers)
    assert not swarm.records("gone")
    swarm.exact()


@pytest.mark.proof
async def test_a_shard_that_nobody_has_halts_the_run(swarm: Swarm) -> None:
    """Its microbatches are handed from one volunteer to the other first; no daemon falls over it."""
    bootstrap = await swarm.bootstrap(together=3)
    (shard,) = swarm.run.manifest.data.train
    (swarm.run.data / shard.name).unlink()
    volunteers = [swarm.volunteer(name, before="impatient") for name in ("one", "other", "third")]
    for child in (bootstrap, *volunteers):
        assert await child.ended() == ExitCode.RUN_CLOSED, child.said
        last = child.said.splitlines()[-1]
        assert last.startswith(("HP-RUN-011: the run was halted", "HP-RUN-010: the run has stopped")), last
        assert "of step 0 is not here" in last
    assert swarm.version == 0
