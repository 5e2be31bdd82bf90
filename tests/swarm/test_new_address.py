"""The only reliable peer gets another address: volunteers find it, and so do newcomers with an old invite."""

import signal
import time

import pytest

from tests.swarm.child import until
from tests.swarm.swarm import Swarm, resign
from tests.wanlab.lab import Lab, needs_lab

pytestmark = [needs_lab, pytest.mark.swarm, pytest.mark.timeout(400), pytest.mark.xdist_group("nat")]
FOUND_S = 15.0


@pytest.mark.parametrize("restarted", [False, True])
async def test_volunteers_find_a_reliable_peer_at_its_new_address(swarm: Swarm, restarted: bool) -> None:
    """Within 15 s, and no step is done again. `restarted`: it is killed, and started at the new address."""
    training = swarm.run.manifest.training.model_copy(update={"steps": 100_000, "checkpoint_every": 50})
    swarm.run = resign(swarm.run, training=training)
    with Lab({"nodes": 3, "latency_ms": 5}) as lab:
        swarm.lab, swarm.listens = lab, "0.0.0.0"
        bootstrap = await swarm.bootstrap(together=2)
        volunteers = [swarm.volunteer(name, node=node) for node, name in enumerate("ab", 1)]
        for volunteer in volunteers:
            await volunteer.says("you are contributing")
        await swarm.committed(13)
        if restarted:
            await bootstrap.kill()
        lab.move(0)
        began = time.monotonic()
        version = swarm.version
        if restarted:
            await swarm.bootstrap()
            began = time.monotonic()
        await until(lambda: swarm.version > version + 1, swarm.voices, 240.0)
        assert time.monotonic() - began < FOUND_S
        assert not swarm.records("rollback")
        for child in volunteers:
            child.signal(signal.SIGINT)
            assert await child.ended() == 0, child.said
        swarm.end()
    assert swarm.judged().steps
