"""Three reliable peers keep the run's log: whichever of them dies, the run goes on, and nothing that was
decided is lost.
"""

import signal
from pathlib import Path

import pytest

from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.process.home import Home
from tests.swarm.child import Child, until
from tests.swarm.conftest import STEPS
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
COUNT = 3
MANY = 1000
"""Steps that nobody waits for."""


def homes(swarm: Swarm, folder: Path) -> list[Path]:
    """Of two more reliable peers, which the manifest names from now on."""
    made = [folder / f"home-{number}" for number in range(1, COUNT)]
    ids = [Identity.load(swarm.run.identity_path).peer_id]
    ids += [Home(home).reliable_identity().peer_id for home in made]
    swarm.run = resign(swarm.run, coordinators=tuple(ids))
    return made


def leader(peers: list[Child]) -> Child | None:
    """Who coordinates, or did last, as the last thing that they said of it tells."""

    def leads(said: str) -> bool:
        return said.rfind(" volunteers") > said.rfind("following ")

    return next((peer for peer in peers if leads(peer.said)), None)


async def kill_the_leader(
    swarm: Swarm, tmp_path: Path
) -> tuple[list[Path], list[Child], list[Child], list[Child]]:
    """Train with three reliable peers and two volunteers, and kill the coordinator after three steps.

    Returns (copies of the run, their reliable peers, those of them that live, volunteers).
    """
    others = homes(swarm, tmp_path)
    first = await swarm.bootstrap()
    paths = [swarm.run.path, *(tmp_path / f"copy-{home.name}" for home in others)]
    peers = [first]
    peers += [
        swarm.reliable(path, "--peers", swarm.address, "--home", str(home), home=home)
        for path, home in zip(paths[1:], others, strict=True)
    ]
    volunteers = [swarm.volunteer(name) for name in "ab"]
    await until(lambda: leader(peers), "somebody coordinates")
    victim = leader(peers)
    assert victim is not None
    await until(lambda: all((path / "manifest.hetpeer").exists() for path in paths), "everybody has a copy")
    swarm.run = RunDirectory.open(paths[peers.index(victim)])
    await swarm.committed(3)
    victim.signal(signal.SIGKILL)
    rest = [peer for peer in peers if peer is not victim]
    return paths, peers, rest, volunteers


async def test_a_leader_is_killed(swarm: Swarm, tmp_path: Path) -> None:
    paths, peers, rest, volunteers = await kill_the_leader(swarm, tmp_path)
    known = swarm.version
    swarm.run = RunDirectory.open(paths[peers.index(rest[0])])
    await swarm.committed(known + 1, within_s=90.0)
    await swarm.finished(*rest, *volunteers)
    logs = [list(read_log(RunDirectory.open(path).log_path)) for path in paths]
    longest = max(logs, key=len)
    assert all(log == longest[: len(log)] for log in logs)
    assert History.of(longest).version == STEPS
    last = leader(rest)
    assert last is not None
    swarm.run = RunDirectory.open(paths[peers.index(last)])
    swarm.exact()


@pytest.mark.proof
async def test_the_only_reliable_peer_is_replaced(swarm: Swarm, tmp_path: Path) -> None:
    """The owner amends the manifest while it trains: another machine has the log, and then the run.

    The old one is not needed.
    """
    home, copy = tmp_path / "home-new", tmp_path / "copy"
    new = Home(home).reliable_identity().peer_id
    swarm.run = resign(swarm.run, training=swarm.run.manifest.training.model_copy(update={"steps": MANY}))
    old = await swarm.bootstrap(before="patient")
    volunteers = [swarm.volunteer(name) for name in "ab"]
    await swarm.committed(3)
    amend = swarm.start("amend", "amend", str(swarm.run.path), "--reliable", new)
    assert await amend.ended() == 0, amend.said
    assert new in amend.printed
    await old.says(f"amendment 1: the reliable peers are {new}")
    invite = old.printed.split()[-1]
    successor = swarm.reliable(copy, "--peers", invite, "--home", str(home), home=home, before="patient")
    assert await old.ended() == ExitCode.RUN_CLOSED
    assert "HP-RUN-014: this machine is not one of the run's reliable peers any more" in old.said
    swarm.run = RunDirectory.open(copy)
    known = swarm.version
    await swarm.committed(known + 3)
    address = successor.printed.splitlines()[0].split()[-1]
    asked = swarm.start("status", "status", "--bootstrap", address, "--watch", "--json")
    await until(
        lambda: asked.shown.get("swarm", {}).get("coordinator"), "it is known that another one coordinates"
    )
    await swarm.stored(known + 3)
    assert not swarm.records("rollback")
    for child in volunteers:
        child.signal(signal.SIGINT)
    await swarm.finished(*volunteers)
    successor.signal(signal.SIGINT)
    assert await successor.ended() == 0, successor.said
    swarm.end()
    verdict = audit(copy)
    assert verdict.ok, verdict.problems
    assert (verdict.lost, verdict.duplicated) == (0, 0)
    assert verdict.steps >= known + 3
