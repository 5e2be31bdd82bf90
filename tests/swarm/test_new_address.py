"""The only reliable peer gets another address: volunteers find it, and so do newcomers with an old invite."""

import signal
import time

import pytest

from hetpeer.peer.arrival.destinations import parse_invite
from tests.swarm.child import until
from tests.swarm.swarm import Swarm, resign
from tests.wanlab.lab import Lab, needs_lab

pytestmark = [needs_lab, pytest.mark.swarm, pytest.mark.timeout(400), pytest.mark.xdist_group("nat")]
FOUND_S = 15.0


def invited(swarm: Swarm) -> set[str]:
    """Peers in the kept invite."""
    return {address.peer_id for address in parse_invite(swarm.run.invite_path.read_text()).addresses}


@pytest.mark.parametrize("restarted", [False, True])
async def test_volunteers_find_a_reliable_peer_at_its_new_address(swarm: Swarm, restarted: bool) -> None:
    """Within 15 s, and no step is done again; a newcomer with the old invite finds it through them.

    `restarted`: the reliable peer is killed, and started at the new address.
    """
    training = swarm.run.manifest.training.model_copy(update={"steps": 100_000, "checkpoint_every": 50})
    swarm.run = resign(swarm.run, training=training)
    with Lab({"nodes": 4, "latency_ms": 5}) as lab:
        swarm.lab, swarm.listens = lab, "0.0.0.0"
        bootstrap = await swarm.bootstrap(together=2)
        volunteers = [swarm.volunteer(name, node=node) for node, name in enumerate("ab", 1)]
        for volunteer in volunteers:
            await volunteer.says("you are contributing")
        await swarm.committed(13)
        members = {volunteer.peer_id for volunteer in volunteers}
        await until(lambda: members <= invited(swarm), lambda: f"an invite with {members}; {swarm.voices()}")
        invite = swarm.run.invite_path.read_text().strip()
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
        newcomer = swarm.volunteer("newcomer", via=invite, node=3)
        await newcomer.says("you are contributing")
        for child in (newcomer, *volunteers):
            child.signal(signal.SIGINT)
            assert await child.ended() == 0, child.said
        swarm.end()
    assert swarm.judged().steps
