"""Three reliable peers keep the run's log: whichever of them dies, the run goes on, and nothing that was decided is lost."""

import shutil
import signal
from pathlib import Path

import pytest

from hetpeer.bootstrap.history import History
from hetpeer.bootstrap.log import read_log
from hetpeer.bootstrap.replay import ReferenceRun
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.dht.identity import Identity
from tests.swarm.conftest import STEPS
from tests.swarm.swarm import Child, Swarm, resign, until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]
COUNT = 3


def three(run: RunDirectory, folder: Path) -> list[RunDirectory]:
    """Copies of `run` for three reliable peers, all of which its manifest names."""
    copies = [run.path, *(folder / f"reliable-{number}" for number in range(1, COUNT))]
    for copy in copies[1:]:
        shutil.copytree(run.path, copy)
        (copy / "identity.key").unlink()
        Identity.create(copy / "identity.key")
    ids = tuple(Identity.load(copy / "identity.key").peer_id for copy in copies)
    signed = resign(run, coordinators=ids)
    for copy in copies[1:]:
        shutil.copy(signed.path / "manifest.hetpeer", copy)
    return [RunDirectory.open(copy) for copy in copies]


def leader(peers: list[Child]) -> Child | None:
    """Who coordinates, or did last, as the last thing that they said of it tells."""

    def leads(said: str) -> bool:
        return said.rfind(" volunteers") > said.rfind("following ")

    return next((peer for peer in peers if leads(peer.said)), None)


async def test_a_leader_is_killed(swarm: Swarm, reference: ReferenceRun, tmp_path: Path) -> None:
    runs = three(swarm.run, tmp_path)
    swarm.run = runs[0]
    first = swarm.reliable(runs[0])
    await swarm.announced(first)
    swarm.address = first.printed.split()[-1]
    peers = [first, *(swarm.reliable(run, "--peers", swarm.address) for run in runs[1:])]
    volunteers = [swarm.volunteer(name) for name in "ab"]
    await until(lambda: leader(peers), "somebody coordinates")
    victim = leader(peers)
    assert victim is not None
    swarm.run = runs[peers.index(victim)]
    await swarm.committed(3)
    victim.signal(signal.SIGKILL)
    rest = [peer for peer in peers if peer is not victim]
    known = swarm.version
    swarm.run = runs[peers.index(rest[0])]
    await swarm.committed(known + 1, within_s=30.0)
    await swarm.finished(*rest, *volunteers)
    logs = [list(read_log(run.log_path)) for run in runs]
    longest = max(logs, key=len)
    assert all(log == longest[: len(log)] for log in logs)
    assert History.of(longest).version == STEPS
    last = leader(rest)
    assert last is not None
    swarm.run = runs[peers.index(last)]
    swarm.exact(reference)
