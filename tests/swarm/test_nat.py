"""Volunteers that accept no connection: what they find out of themselves, and that they train, through a
relay that dies.
"""

import signal

import pytest

from hetpeer.bootstrap.audit.audit import audit
from tests.swarm.child import Child, until
from tests.swarm.swarm import Swarm, resign
from tests.wanlab.lab import Lab, needs_lab

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400), pytest.mark.xdist_group("nat")]
KNOWN_S = 100.0
"""Ten times the goal for how long after its start a volunteer knows its reachability."""


def latest(watcher: Child, one: Child, other: Child) -> tuple[str, list[str], list[str]] | None:
    """What `hetpeer status --watch --json` last said of volunteer `one`: reach, relays, and the path of
    its link to `other`.
    """
    peers = watcher.shown.get("peers", [])
    found = (
        (
            peer["reach"],
            peer["relays"],
            [link["path"] for link in peer["links"] if other.peer_id.endswith(link["to"])],
        )
        for peer in peers
        if peer["peer"] == one.peer_id
    )
    return next(found, None)


async def both_go(watcher: Child, volunteers: list[Child], way: tuple[str, list[str], list[str]]) -> None:
    """Return when it is said of both of `volunteers` that this is their way to each other.

    It may also be said why it leads through a relay.
    """
    reach, relays, paths = way

    def said() -> list[tuple[str, list[str], list[str]] | None]:
        one, other = volunteers
        return [latest(watcher, one, other), latest(watcher, other, one)]

    def is_said() -> bool:
        told = [(found[0], found[1], [path.split(":")[0] for path in found[2]]) for found in said() if found]
        return told == [(reach, relays, paths)] * 2

    await until(is_said, lambda: f"the way of both: {said()}", 100.0)


@pytest.mark.proof
@needs_lab
async def test_closed_volunteers_train_through_a_relay_that_dies(swarm: Swarm) -> None:
    """Both stages are held by volunteers that accept no connection. The relay's p2pd is killed in the middle.

    An open volunteer is there for a while: it finds out that it is, and may help the others to find out that
    they are not.
    """
    training = swarm.run.manifest.training.model_copy(update={"steps": 1000})
    swarm.run = resign(swarm.run, training=training)
    with Lab({"nodes": 4, "latency_ms": 5, "no_inbound": ["n1", "n2"]}) as lab:
        swarm.lab = lab
        lab.order("cut n1 n2")  # a hole punched between them would take the relay out of the test
        bootstrap = await swarm.bootstrap()
        relay = swarm.address.rpartition("/")[2]
        opened = swarm.volunteer("open", node=3)
        await opened.says(f"others reach this machine at {lab.address(3)}", KNOWN_S)
        names = "one", "two"
        closed = [swarm.volunteer(name, node=node) for node, name in enumerate(names, 1)]
        for volunteer in closed:
            await volunteer.says("no connection from outside reaches this machine (", KNOWN_S)
            await volunteer.says(f"through the relay …{relay[-6:]}", KNOWN_S)
        opened.signal(signal.SIGKILL)
        watcher = swarm.start("watcher", "status", "--bootstrap", swarm.address, "--watch", "--json")
        await swarm.committed(5)
        p2pd = bootstrap.helpers()["p2pd"]
        p2pd.kill()
        await until(lambda: bootstrap.helpers().get("p2pd", p2pd).pid != p2pd.pid, "a new p2pd")
        before = swarm.version
        await both_go(watcher, closed, ("private", [relay[-8:]], [f"through {relay[-8:]}"]))
        await swarm.stored(before + 1)
        for child in closed:
            child.signal(signal.SIGINT)
        for child in closed:
            assert await child.ended() == 0, child.said
        bootstrap.signal(signal.SIGINT)
        assert await bootstrap.ended() == 0, bootstrap.said
        swarm.end()
    verdict = audit(swarm.run.path)
    assert verdict.ok, verdict.problems
    assert (verdict.lost, verdict.duplicated) == (0, 0)
    assert verdict.steps > before


@needs_lab
async def test_volunteers_that_cannot_reach_each_other_train_through_the_reliable_peer(swarm: Swarm) -> None:
    """Both take connections, as others find, but every packet between the two is lost."""
    training = swarm.run.manifest.training.model_copy(update={"steps": 1000})
    swarm.run = resign(swarm.run, training=training)
    with Lab({"nodes": 3, "latency_ms": 5}) as lab:
        swarm.lab = lab
        lab.order("cut n1 n2")
        bootstrap = await swarm.bootstrap()
        relay = swarm.address.rpartition("/")[2]
        names = "one", "two"
        volunteers = [swarm.volunteer(name, node=node) for node, name in enumerate(names, 1)]
        for node, volunteer in enumerate(volunteers, 1):
            await volunteer.says(f"others reach this machine at {lab.address(node)}", KNOWN_S)
        watcher = swarm.start("watcher", "status", "--bootstrap", swarm.address, "--watch", "--json")
        await both_go(watcher, volunteers, ("public", [], [f"through {relay[-8:]}"]))
        await swarm.committed(5)
        await swarm.stored(5)
        for child in (*volunteers, bootstrap):
            child.signal(signal.SIGINT)
            assert await child.ended() == 0, child.said
        swarm.end()
    verdict = audit(swarm.run.path)
    assert verdict.ok, verdict.problems
    assert (verdict.lost, verdict.duplicated) == (0, 0)
    assert verdict.steps >= 5
