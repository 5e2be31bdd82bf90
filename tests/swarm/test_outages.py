"""The only reliable peer is away for a while, and the volunteers keep everything in memory."""

import asyncio

import pytest

from tests.swarm.swarm import Swarm

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
