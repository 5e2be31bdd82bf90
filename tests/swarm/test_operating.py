"""Reliable peers and rendezvous as their owner has them: asked, stopped, and looked after by systemd."""

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetpeer.dht.base.errors import ExitCode
from hetpeer.peer.control.control_client import ask
from hetpeer.peer.control.control_messages import ControlRequest, DaemonStatus, ReliableStatus
from tests.swarm.child import Child, until
from tests.swarm.swarm import Swarm
from tests.swarm.test_bad_input import fails, serve
from tests.swarm.test_joining import rendezvous, to_be_held_by_one
from tests.swarm.test_reliable import homes

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


class Systemd:
    """Listens at `path`, and reads all the time: a socket keeps ten words at most."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.heard: list[str] = []
        self._there = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._there.bind(path)
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        while word := self._there.recv(4096):
            self.heard.append(word.decode())

    def close(self) -> None:
        """An empty word is the last."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"", self.path)
        self._reading.join()
        self._there.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    there = Systemd(str(tmp_path / "notify"))
    yield there
    there.close()


def standing(folder: Path) -> DaemonStatus:
    return ask(folder, ControlRequest(do="status"))


def known(folder: Path) -> ReliableStatus:
    reliable = standing(folder).reliable
    assert reliable is not None
    return reliable


async def does(swarm: Swarm, *arguments: str, folder: Path) -> Child:
    """An owner's command, done."""
    child = swarm.start("owner", *arguments, "--home", str(folder))
    await child.ended()
    return child


async def test_a_reliable_peer_is_asked_and_stopped(swarm: Swarm, systemd: Systemd) -> None:
    to_be_held_by_one(swarm)
    folder = swarm.run.path
    bootstrap = await swarm.bootstrap(before=f"as_a_service:{systemd.path}")
    assert (standing(folder).state, standing(folder).reason) == ("waiting", "no_peers")
    found = known(folder)
    assert (found.pid, found.leader, found.version, found.stored) == (bootstrap.pid, found.peer, 0, 0)
    assert [(one.peer, one.lacks, one.silent_s) for one in found.members] == [(found.peer, 0, None)]
    assert not standing(folder).month_bytes

    volunteer = swarm.volunteer("volunteer")
    await swarm.stored(3)
    await until(lambda: standing(folder).state == "training", "it trains")
    assert known(folder).version >= 3
    assert known(folder).stored >= 3
    shown = await does(swarm, "status", folder=folder)
    assert shown.status == ExitCode.OK, shown.said
    lines = shown.printed.splitlines()
    assert lines[0].startswith("here      training since ")
    assert any(line.startswith(f"reliable  coordinates in term {known(folder).term}; ") for line in lines)
    assert f"member    …{found.peer[-6:]}  itself, has all records" in lines
    assert any(line.startswith("run ") for line in lines), "and the swarm, asked through it"

    await fails(await does(swarm, "pause", folder=folder), ExitCode.USAGE, "HP-CTL-005", "hetpeer stop")
    await fails(serve(swarm), ExitCode.IDENTITY, "HP-LOG-002")
    logged = await does(swarm, "logs", "-n", "1000", folder=folder)
    assert "leading in term" in logged.printed
    assert " info step " in logged.printed

    volunteer.signal(signal.SIGINT)
    await volunteer.ended()
    stopped = await does(swarm, "stop", folder=folder)
    assert (stopped.status, stopped.printed) == (ExitCode.OK, "stopped\n"), stopped.said
    assert await bootstrap.ended() == ExitCode.OK
    assert "stopped; start it again to continue the run" in bootstrap.said
    await until(lambda: systemd.heard[-1:] == ["STATUS=stopped"], "systemd knows")
    words = systemd.heard
    assert words.index("STATUS=waiting (no_peers)") < words.index("STATUS=training")
    assert words.index("READY=1") < words.index("STATUS=training") < words.index("STOPPING=1")
    assert words.count("WATCHDOG=1") > 2
    await fails(await does(swarm, "stop", folder=folder), ExitCode.NOT_RUNNING, "HP-CTL-001", str(folder))
    assert swarm.judged().steps >= 3


@pytest.mark.proof
async def test_three_reliable_peers_know_how_far_each_is(swarm: Swarm, tmp_path: Path) -> None:
    """Who coordinates knows of all; one that is frozen is missed, and the one that is stopped hands over."""
    others = homes(swarm, tmp_path)
    paths = [swarm.run.path, *(tmp_path / f"copy-{home.name}" for home in others)]
    peers = [await swarm.bootstrap()]
    peers += [
        swarm.reliable(path, "--peers", swarm.address, "--home", str(home), home=home)
        for path, home in zip(paths[1:], others, strict=True)
    ]
    by_path = dict(zip(paths, peers, strict=True))
    await until(lambda: all((path / "control.sock").exists() for path in paths), "all of them answer")

    def agree() -> bool:
        found = [standing(path).reliable for path in by_path if by_path[path].status is None]
        views = {(one.leader, one.term) if one is not None else ("", 0) for one in found}
        return len(views) == 1 and ("", 0) not in views and views.pop()[0] != ""

    await until(agree, "they agree on who coordinates")
    first = next(path for path in paths if known(path).leader == known(path).peer)
    follower, frozen = (path for path in paths if path != first)
    assert standing(first).state == "waiting"
    await until(lambda: standing(follower).state == "following", "it follows")
    await until(lambda: all(one.lacks == 0 for one in known(first).members), "all have all records")
    theirs = {one.peer: one for one in known(follower).members}
    assert theirs[known(follower).peer].lacks == 0
    assert theirs[known(first).peer].silent_s is not None
    assert theirs[known(frozen).peer].lacks is theirs[known(frozen).peer].silent_s is None

    missed, term = known(frozen).peer, known(first).term
    by_path[frozen].signal(signal.SIGSTOP)

    def silence() -> float:
        return next(one.silent_s for one in known(first).members if one.peer == missed) or 0.0

    await until(lambda: silence() > 3.0, "it is missed")
    by_path[frozen].signal(signal.SIGCONT)
    await until(lambda: silence() < 1.0, "it is heard again")
    stopped = await does(swarm, "stop", folder=first)
    assert stopped.status == ExitCode.OK, stopped.said
    await until(lambda: by_path[first].status is not None, "it has ended")
    await until(lambda: agree() and known(follower).term > term, "another one coordinates")
    for path in (follower, frozen):
        assert (await does(swarm, "stop", folder=path)).status == ExitCode.OK
        assert await by_path[path].ended() == ExitCode.OK, by_path[path].said


async def test_a_rendezvous_is_asked_and_stopped(swarm: Swarm, systemd: Systemd) -> None:
    """Beside it a volunteer may live in the same home, so it has a folder of its own."""
    child, address = await rendezvous(swarm, "meeting", before=f"as_a_service:{systemd.path}")
    folder = child.home / "rendezvous"
    assert standing(folder).state == "serving"
    assert address in standing(folder).addresses
    assert standing(folder).reliable is None
    twin = swarm.start("twin", "bootstrap", "--host", "127.0.0.1", "--port", "0", home=child.home)
    await fails(twin, ExitCode.IDENTITY, "HP-ID-002", f"pid {child.pid}", "rendezvous.key")
    assert (await does(swarm, "stop", folder=folder)).printed == "stopped\n"
    assert await child.ended() == ExitCode.OK
    await until(lambda: systemd.heard[-1:] == ["STATUS=stopped"], "systemd knows")
    words = systemd.heard
    assert [word for word in words if not word.startswith("WATCHDOG")] == [
        *("STATUS=serving", "READY=1", "STOPPING=1", "STATUS=draining (stop)", "STATUS=stopped")
    ]
