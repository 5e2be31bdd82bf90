"""What systemd hears, on a socket like its own."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetpeer.peer.control.owned_daemon import Notifier


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
