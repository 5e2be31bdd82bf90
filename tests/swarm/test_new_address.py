"""The only reliable peer gets another address: volunteers find it, and so do newcomers with an old invite."""

import signal
import time

import pytest

from hetpeer.peer.arrival.destinations import parse_invite
from tests.swarm.child import until
from tests.swarm.swarm import Swarm, resign
from tests.wanlab.lab import Lab, needs_lab

pytestmark = [needs_lab, pytest.mark.swarm, pytest.mark.timeout(400), pytest.mark.xdist_group("nat")]
FOUND_S = 45.0
"""Three times the goal, for a busy machine; before, it took 113 s."""


def invited(swarm: Swarm) -> set[str]:
    """Peers in the kept invite."""
    return {address.peer_id for address in parse_invite(swarm.run.invite_path.read_text()).addresses}


@pytest.mark.parametrize("how", ["moved", "restarted", "renumbered"])
async def test_volunteers_find_a_reliable_peer_at_its_new_address(swarm: Swarm, how: str) -> None:
    """Within seconds, and no step is done again; a newcomer with the old invite finds it through them.

    `restarted`: the reliable peer is killed, and started at the new address. `renumbered`: the router before
    it has the new address, so the reliable peer does not see it.
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
        if how == "restarted":
            await bootstrap.kill()
        if how == "renumbered":
            lab.renumber(0)
        else:
            lab.move(0)
        began = time.monotonic()
        version = swarm.version
        if how == "restarted":
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


async def test_a_volunteer_that_takes_no_connections_asks_others(swarm: Swarm) -> None:
    """The moved reliable peer cannot call it, and was its relay: another volunteer knows the new address."""
    training = swarm.run.manifest.training.model_copy(update={"steps": 100_000, "checkpoint_every": 50})
    swarm.run = resign(swarm.run, training=training)
    with Lab({"nodes": 3, "latency_ms": 5, "no_inbound": ["n1"]}) as lab:
        swarm.lab, swarm.listens = lab, "0.0.0.0"
        await swarm.bootstrap(together=2)
        volunteers = [swarm.volunteer(name, node=node) for node, name in enumerate(("closed", "open"), 1)]
        for volunteer in volunteers:
            await volunteer.says("you are contributing", 120.0)
        await volunteers[0].says("through the relay")
        await swarm.committed(7)
        lab.move(0)
        began, version = time.monotonic(), swarm.version
        await until(lambda: swarm.version > version + 1, swarm.voices, 240.0)
        assert time.monotonic() - began < FOUND_S
        assert not swarm.records("rollback")
        for child in volunteers:
            child.signal(signal.SIGINT)
            assert await child.ended() == 0, child.said
        swarm.end()
    assert swarm.judged().steps
