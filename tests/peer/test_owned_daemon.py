"""A daemon that its owner asks and stops, what is shown of a reliable peer, and what systemd hears."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.peer.cli.swarm.status_text import Here, own_lines
from hetpeer.peer.control.control_client import ask
from hetpeer.peer.control.control_messages import (
    ControlRequest,
    DaemonStatus,
    ReliableMember,
    ReliableStatus,
    decode_answer,
)
from hetpeer.peer.control.owned_daemon import AttendedDaemon, Notifier, attended
from hetpeer.peer.process.log_files import LogReader
from hetpeer.peer.reliable.reliable_status import doing

ONE, OTHER, THIRD = (f"Qm{'x' * 38}{name}" for name in ("ONE111", "TWO222", "THREE3"))
RELIABLE = ReliableStatus(
    pid=1,
    run="tiny",
    peer=ONE,
    leader=ONE,
    term=3,
    records=1234,
    version=120,
    steps=20000,
    stored=100,
    members=(
        ReliableMember(peer=ONE, lacks=0),
        ReliableMember(peer=OTHER, lacks=1, silent_s=75.0),
        ReliableMember(peer=THIRD),
    ),
)


@pytest.mark.parametrize("do", ["pause", "resume", "finish", "set"])
def test_what_it_does_not_do(do: Any) -> None:
    daemon = AttendedDaemon(SystemClock(), asyncio.Event(), Notifier(""))
    request = ControlRequest(do=do, **({"key": "limits.up", "value": "none"} if do == "set" else {}))
    with pytest.raises(LocalError) as caught:
        daemon.answer(request)
    assert (caught.value.code, caught.value.exit_code) == ("HP-CTL-005", ExitCode.USAGE)
    assert do in caught.value.what


async def test_it_lives_in_its_folder_alone(tmp_path: Path) -> None:
    """One that is stopped has left its last word in its log, and its socket is gone."""
    leaving, key = asyncio.Event(), tmp_path / "some.key"

    async def lives() -> None:
        async with attended(tmp_path, key, leaving) as daemon:
            daemon.does("training")
            daemon.shows(lambda: RELIABLE)
            found = await asyncio.to_thread(ask, tmp_path, ControlRequest(do="status"))
            assert (found.state, found.reliable) == ("training", RELIABLE)
            with pytest.raises(LocalError, match=r"HP-ID-002: .*some\.key"):
                async with attended(tmp_path, key, asyncio.Event()):
                    pytest.fail("two live there")
            found = await asyncio.to_thread(ask, tmp_path, ControlRequest(do="stop"))
            assert (found.state, found.reason, leaving.is_set()) == ("draining", "stop", True)
            raise LocalError("HP-NET-002", "nobody answers", why="a test", fix="nothing")

    with pytest.raises(LocalError, match="HP-NET-002"):
        await lives()
    assert "HP-NET-002: nobody answers" in LogReader(tmp_path).last(1)[0].event
    assert not (tmp_path / "control.sock").exists()


def test_it_travels() -> None:
    standing = DaemonStatus(state="training", since=1.0, reliable=RELIABLE)
    assert decode_answer(standing.encode()) == standing


@pytest.mark.parametrize(
    ("leader", "said"),
    [
        (ONE, "coordinates in term 3; 120/20,000 steps committed, checkpoint 100, 1,234 records"),
        (OTHER, "follows …TWO222 in term 3; "),
        ("", "follows no coordinator in term 3; "),
    ],
)
def test_it_is_shown(leader: str, said: str) -> None:
    reliable = RELIABLE.model_copy(update={"leader": leader})
    lines = list(own_lines(Here(DaemonStatus(state="training", since=1.0, reliable=reliable))))
    (_, summary), *members = lines[1:]
    assert summary.startswith(said)
    assert members == [
        ("member", "…ONE111  itself, has all records"),
        ("member", "…TWO222  lacks 1 record, heard 1m 15s ago"),
        ("member", "…THREE3  only the coordinator knows more"),
    ]


@pytest.mark.parametrize(
    ("leader", "missing", "is_over", "does"),
    [
        (None, None, False, ("following", "no_coordinator")),
        (ONE, None, False, ("following", "no_coordinator")),  # it has won, and does not serve yet
        (OTHER, None, False, ("following", "")),
        (ONE, [0], False, ("waiting", "no_peers")),
        (ONE, [], False, ("training", "")),
        (ONE, [], True, ("finished", "")),
    ],
)
async def test_what_a_reliable_peer_does(
    leader: str | None, missing: list[int] | None, is_over: bool, does: tuple[str, str]
) -> None:
    halted = asyncio.get_running_loop().create_future()
    if is_over:
        halted.set_result(None)
    service = SimpleNamespace(halted=halted, core=SimpleNamespace(missing_blocks=missing))
    disk = SimpleNamespace(error=None)
    peer: Any = SimpleNamespace(
        replica=SimpleNamespace(leader=leader, me=ONE),
        service=None if missing is None else service,
        disk=disk,
    )
    assert doing(peer) == does
    disk.error = LocalError("HP-DISK-002", "no room", why="full", fix="free some")
    assert doing(peer) == ("waiting", "no_room")


async def test_why_something_is_not_saved_is_in_the_status(tmp_path: Path) -> None:
    """For instance checkpoints, while the run goes on."""
    errors: list[LocalError] = []
    async with attended(tmp_path, tmp_path / "identity.key", asyncio.Event()) as daemon:
        daemon.shows(lambda: RELIABLE, lambda: errors[0] if errors else None)
        assert daemon.standing.why == ""
        errors.append(LocalError("HP-DISK-002", "no room", why="full", fix="free some"))
        assert daemon.standing.why == "HP-DISK-002: no room; why: full; do: free some"


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """The socket, and what NOTIFY_SOCKET says."""
    name = f"hetpeer-test-{os.getpid()}"
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(f"\0{name}" if request.param == "abstract" else path)
        there.setblocking(False)
        yield there, f"@{name}" if request.param == "abstract" else path


def test_it_is_told(systemd: tuple[socket.socket, str]) -> None:
    there, address = systemd
    notifier = Notifier(address)
    notifier.tell("READY")
    notifier.tell("STATUS", "paused\nMAINPID=1")
    assert there.recv(100) == b"READY=1"
    assert there.recv(100) == b"STATUS=paused MAINPID=1"


async def test_the_watchdog_hears_of_the_loop(systemd: tuple[socket.socket, str]) -> None:
    there, address = systemd
    watching = asyncio.ensure_future(Notifier(address, watchdog_s=0.02).watch_forever())
    loop = asyncio.get_running_loop()
    for _ in range(3):
        assert await asyncio.wait_for(loop.sock_recv(there, 100), 5.0) == b"WATCHDOG=1"
    watching.cancel()


async def test_nobody_there() -> None:
    notifier = Notifier("", watchdog_s=0.001)
    notifier.tell("READY")
    await notifier.watch_forever()  # returns
    Notifier("/nonexistent/notify").tell("READY")


@pytest.mark.parametrize(
    ("usec", "pid", "watchdog_s"),
    [("30000000", "", 30.0), ("30000000", "ours", 30.0), ("30000000", "1", None), ("x", "", None)],
)
def test_as_the_environment_says(
    usec: str, pid: str, watchdog_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "NOTIFY_SOCKET": "/n",
        "WATCHDOG_USEC": usec,
        "WATCHDOG_PID": pid.replace("ours", str(os.getpid())),
    }.items():
        monkeypatch.setenv(name, value)
    assert Notifier.of_environment().watchdog_s == watchdog_s
    monkeypatch.delenv("NOTIFY_SOCKET")
    assert Notifier.of_environment().watchdog_s is None
