"""Joining by an invite: through a rendezvous that serves no run, and when that is gone, by what the home remembers."""

import signal

import pytest

from hetpeer.dht.addresses import parse_address
from hetpeer.dht.errors import ExitCode
from hetpeer.peer.home import Home
from hetpeer.peer.invites import make_invite, parse_invite
from tests.swarm.swarm import Child, Swarm, resign, until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]
LOOPBACK = ("--host", "127.0.0.1")


async def rendezvous(swarm: Swarm, name: str, *options: str) -> tuple[Child, str]:
    """A running one, and its address."""
    child = swarm.start(name, "bootstrap", *LOOPBACK, "--port", "0", *options)
    await until(lambda: child.printed or child.status is not None, "the rendezvous is ready")
    return child, child.printed.split()[-1]


def joins(swarm: Swarm, name: str, *arguments: str, **how) -> Child:  # type: ignore[no-untyped-def]
    return swarm.start(name, "join", *arguments, *LOOPBACK, "--name", name, **how)


async def test_a_run_is_found_through_a_rendezvous_and_found_again_without_it(swarm: Swarm) -> None:
    """The rendezvous by which the volunteer comes is not even the one of the run's reliable peer."""
    training = swarm.run.manifest.training.model_copy(update={"steps": 1000})
    blocks = len(swarm.run.manifest.blocks)
    swarm.run = resign(swarm.run, training=training, layouts=(((0, blocks),),))
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
    await back.says("now those by whom the run was found before")
    await swarm.committed(version + 3)
    await swarm.stored(version + 3)
    back.signal(signal.SIGINT)
    await back.ended()
    bootstrap.signal(signal.SIGINT)
    await bootstrap.ended()
    assert swarm.judged().steps >= version + 3


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
    assert await lying.ended(60.0) == ExitCode.VERSION
    assert f"HP-RUN-016: {Home(swarm.run.path).identity().peer_id} serves another run" in lying.said
    assert await damaged.ended() == ExitCode.USAGE
    assert "HP-ADDR-003: " in damaged.said
    assert await homeless.ended() == ExitCode.USAGE
    assert "HP-ADDR-002: " in homeless.said
