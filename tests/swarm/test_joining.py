"""Joining by an invite: through a rendezvous that serves no run, and when that is gone, by what the home
remembers.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

from hetpeer.dht.base.errors import ExitCode
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.peer.arrival.destinations import make_invite, parse_invite
from hetpeer.peer.process.home import Home
from hetpeer.peer.process.identity_backup import backup, restore
from tests.swarm.child import Child, until
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
LOOPBACK = ("--host", "127.0.0.1")


async def rendezvous(swarm: Swarm, name: str, *options: str, **how: Any) -> tuple[Child, str]:
    """A running one, and its address; `how` as in `Swarm.start`."""
    child = swarm.start(name, "bootstrap", *LOOPBACK, "--port", "0", *options, **how)
    await until(lambda: child.printed or child.status is not None, "the rendezvous is ready")
    return child, child.printed.split()[-1]


def joins(swarm: Swarm, name: str, *arguments: str, **how) -> Child:  # type: ignore[no-untyped-def]
    return swarm.start(name, "join", *arguments, *LOOPBACK, "--name", name, **how)


def to_be_held_by_one(swarm: Swarm) -> None:
    """A long run whose volunteer holds all blocks."""
    training = swarm.run.manifest.training.model_copy(update={"steps": 1000})
    layouts = (((0, len(swarm.run.manifest.blocks)),),)
    swarm.run = resign(swarm.run, training=training, layouts=layouts)


async def test_a_run_is_found_through_a_rendezvous_and_found_again_without_it(swarm: Swarm) -> None:
    """The rendezvous by which the volunteer comes is not even the one of the run's reliable peer."""
    to_be_held_by_one(swarm)
    first, at_first = await rendezvous(swarm, "first")
    second, at_second = await rendezvous(swarm, "second", "--peers", at_first)
    bootstrap = await swarm.bootstrap("--peers", at_first)
    printed = parse_invite(bootstrap.printed.split()[-1])
    assert printed.run == swarm.run.run_id
    assert list(map(str, printed.addresses)) == [swarm.address, at_first]
    link = str(make_invite("tiny", swarm.run.run_id, [parse_address(at_second)]))
    volunteer = joins(swarm, "volunteer", link)
    await swarm.committed(3)
    twin = joins(swarm, "twin", link, home=volunteer.home)
    assert await twin.ended() == ExitCode.IDENTITY
    assert f"HP-ID-002: another process (pid {volunteer.pid}) runs with the identity" in twin.said
    remembered = volunteer.home / "peers.json"
    await until(lambda: swarm.address in remembered.read_text(), "the reliable peer is remembered")
    await swarm.stored(3)
    for child in (first, second, volunteer):
        child.signal(signal.SIGINT)
        assert await child.ended() == 0, child.said
    version = swarm.version
    back = joins(swarm, "back", link, home=volunteer.home)
    await back.says("trying the addresses remembered from the last time")
    await swarm.committed(version + 3)
    await swarm.stored(version + 3)
    back.signal(signal.SIGINT)
    await back.ended()
    bootstrap.signal(signal.SIGINT)
    await bootstrap.ended()
    assert swarm.judged().steps >= version + 3


@pytest.mark.proof
async def test_an_identity_moves_to_another_home_in_the_middle_of_a_run(swarm: Swarm, tmp_path: Path) -> None:
    """With its key alone.

    The coordinator is started again, and asks it for what it did: the audit finds nothing told twice.
    """
    to_be_held_by_one(swarm)
    bootstrap = await swarm.bootstrap()
    link = bootstrap.printed.split()[-1]
    volunteer = joins(swarm, "volunteer", link)
    await swarm.stored(1)
    volunteer.signal(signal.SIGINT)
    await volunteer.ended()
    backup(volunteer.home / "identity.key", tmp_path / "copy")
    moved_to = Home(tmp_path / "moved")
    restore(tmp_path / "copy", moved_to.key, replace=False)
    moved = joins(swarm, "moved", link, home=moved_to.path)
    version = swarm.version
    await swarm.committed(version + 1)
    await bootstrap.kill()
    bootstrap = await swarm.bootstrap()
    version = swarm.version
    await swarm.committed(version + 1)
    await swarm.stored(version + 1)
    for child in (moved, bootstrap):
        child.signal(signal.SIGINT)
        await child.ended()
    assert moved.peer_id == volunteer.peer_id
    assert swarm.judged().steps > version


async def test_an_invite_is_to_one_run_only(swarm: Swarm) -> None:
    """Whoever answers at its addresses; and a damaged one leads nowhere."""
    bootstrap = await swarm.bootstrap()
    link = bootstrap.printed.split()[-1]
    shown = swarm.start(
        "invite",
        "invite",
        str(swarm.run.path),
        "--bootstrap",
        "/dns4/a.example/tcp/9/p2p/" + swarm.address.rpartition("/")[2],
    )
    lying = joins(swarm, "lying", "--bootstrap", swarm.address, "--run", "0" * 32)
    damaged = joins(swarm, "damaged", link[:-3])
    homeless = joins(swarm, "homeless")
    assert await shown.ended() == 0, shown.said
    more, own = parse_invite(shown.printed).addresses
    assert (str(own), more.transport) == (swarm.address, "/dns4/a.example/tcp/9")
    assert await lying.ended() == ExitCode.VERSION
    assert f"HP-RUN-016: {Home(swarm.run.path).identity().peer_id} serves another run" in lying.said
    assert await damaged.ended() == ExitCode.USAGE
    assert "HP-ADDR-003: " in damaged.said
    assert await homeless.ended() == ExitCode.USAGE
    assert "HP-ADDR-002: " in homeless.said
