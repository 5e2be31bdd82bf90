"""The only reliable peer is away for a while, or the only holder of a block: nothing is lost from memory."""

import asyncio
import signal

import pytest

from tests.swarm.child import until
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]


@pytest.mark.proof
@pytest.mark.parametrize("away_s", [30.0, 60.0])
async def test_an_outage_of_the_only_reliable_peer_costs_no_step(swarm: Swarm, away_s: float) -> None:
    """It was killed; its volunteers find it within seconds of its return and go on from memory."""
    _, volunteers = await swarm.without_end(serves="")
    bootstrap, *_ = swarm.children
    await swarm.stored(10)
    await swarm.committed(13)
    await bootstrap.kill()
    version = swarm.version
    await asyncio.sleep(away_s)
    await swarm.bootstrap()
    await swarm.committed(version + 3)
    assert not swarm.records("rollback")
    for child in volunteers:
        await child.kill()
    assert swarm.judged().steps


@pytest.mark.proof
async def test_a_frozen_only_holder_costs_no_step(swarm: Swarm) -> None:
    """Its daemon, worker and p2pd stand still beyond the lease, and thaw with everything in memory."""
    training = swarm.run.manifest.training.model_copy(update={"steps": 100_000, "checkpoint_every": 50})
    swarm.run = resign(swarm.run, training=training)
    await swarm.bootstrap(together=2)
    volunteers = [swarm.volunteer(name) for name in "ab"]
    for volunteer in volunteers:
        await volunteer.says("you are contributing")
    await swarm.committed(7)
    frozen = volunteers[0]
    helpers = frozen.helpers().values()
    frozen.signal(signal.SIGSTOP)
    for helper in helpers:
        helper.suspend()
    await swarm.gone(frozen)
    await asyncio.sleep(4.0)  # with the lease that is a stop of 14 s
    for helper in helpers:
        helper.resume()
    frozen.signal(signal.SIGCONT)
    version, applied = swarm.version, swarm.updates(frozen)
    await swarm.committed(version + 3)
    await until(lambda: swarm.updates(frozen) > applied, "it works again")
    assert all(record["to_version"] >= version for record in swarm.records("rollback"))
    assert swarm.lives(frozen) == 1
    for child in volunteers:
        await child.kill()
    assert swarm.judged().steps
