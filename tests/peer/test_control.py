"""The control socket: real ones, and everything that may come in over them."""

import asyncio
import contextlib
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.control import control_client, owned_daemon
from hetpeer.peer.control.control_client import ask, connected
from hetpeer.peer.control.control_messages import (
    MAX_ANSWER,
    MAX_REQUEST,
    SOCKET,
    ControlRequest,
    DaemonStatus,
    decode_answer,
    encode_error,
)
from hetpeer.peer.control.owned_daemon import serving

PAUSED = DaemonStatus(state="paused", reason="user", since=1.5, until=9.0, addresses=("/ip4/127.0.0.1",))


class Owner:
    """Counts what is asked."""

    def __init__(self) -> None:
        self.asked: list[ControlRequest] = []

    def __call__(self, request: ControlRequest) -> DaemonStatus:
        self.asked.append(request)
        return PAUSED


async def said(home: Path, data: bytes) -> list[dict[str, Any]]:
    """The answers to the lines of `data`, of which the last may have no end."""
    reader, writer = await asyncio.open_unix_connection(str(home / SOCKET), limit=MAX_ANSWER)
    writer.write(data)
    lines = [await asyncio.wait_for(reader.readline(), 5.0) for _ in range(max(1, data.count(b"\n")))]
    writer.close()
    return [json.loads(line) for line in lines]


async def refused(code: str, *call: Any) -> LocalError:
    with pytest.raises(LocalError) as caught:
        await asyncio.to_thread(*call)
    assert caught.value.code == code
    return caught.value


async def test_a_question_and_its_answer(tmp_path: Path) -> None:
    owner = Owner()
    async with serving(tmp_path, owner):
        pause = ControlRequest(do="pause", for_s=60.0)
        assert await asyncio.to_thread(ask, tmp_path, pause) == PAUSED
        assert await asyncio.to_thread(ask, tmp_path, ControlRequest(do="status")) == PAUSED
        assert stat.S_IMODE((tmp_path / SOCKET).stat().st_mode) == 0o600
    assert owner.asked == [pause, ControlRequest(do="status")]
    assert not list(tmp_path.iterdir())
    error = await refused("HP-CTL-001", ask, tmp_path, pause)
    assert error.exit_code == ExitCode.NOT_RUNNING


def test_whole_seconds_are_a_time() -> None:
    assert ControlRequest.decode(b'{"do": "pause", "for_s": 5400}') == ControlRequest(
        do="pause", for_s=5400.0
    )


async def test_a_path_longer_than_an_address(tmp_path: Path) -> None:
    home = tmp_path / ("long" * 40) / ("longer" * 30)
    home.mkdir(parents=True)
    async with serving(home, Owner()):
        assert await asyncio.to_thread(ask, home, ControlRequest(do="status")) == PAUSED


async def test_what_a_killed_daemon_left_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / SOCKET))
    await refused("HP-CTL-001", ask, tmp_path, ControlRequest(do="status"))
    async with serving(tmp_path, Owner()):
        inode = (tmp_path / SOCKET).stat().st_ino
        with pytest.raises(LocalError, match="HP-ID-002") as caught:
            async with serving(tmp_path, Owner()):
                raise AssertionError
        assert caught.value.exit_code == ExitCode.IDENTITY
        assert (tmp_path / SOCKET).stat().st_ino == inode
        assert await asyncio.to_thread(ask, tmp_path, ControlRequest(do="status")) == PAUSED


async def test_where_no_socket_can_be(tmp_path: Path) -> None:
    (tmp_path / SOCKET).mkdir()
    with pytest.raises(LocalError, match="HP-DISK-001"):
        async with serving(tmp_path, Owner()):
            raise AssertionError
    for home in (tmp_path / "nowhere", Path("/dev/null")):
        await refused("HP-CTL-001", ask, home, ControlRequest(do="status"))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"pause",
        b"[]",
        b"null",
        b"{}",
        b'{"do": "reboot"}',
        b'{"do": "pause", "for_s": -1}',
        b'{"do": "pause", "for_s": 1e400}',
        b'{"do": "pause", "for_s": NaN}',
        b'{"do": "pause", "for_s": "60"}',
        b'{"do": "stop", "for_s": 60}',
        b'{"do": "stop", "now": true}',
        b'{"do": "\xff"}',
        b"[" * (MAX_REQUEST - 1),
    ],
)
async def test_bad_input_is_one_line_and_the_connection_goes_on(line: bytes, tmp_path: Path) -> None:
    owner = Owner()
    async with serving(tmp_path, owner):
        wrong, right = await said(tmp_path, line + b'\n{"do": "resume"}\n')
    assert wrong["error"]["code"] == "HP-CTL-003"
    assert right["state"] == "paused"
    assert owner.asked == [ControlRequest(do="resume")]


async def test_a_line_without_end_is_not_kept(tmp_path: Path) -> None:
    async with serving(tmp_path, Owner()):
        (answer,) = await said(tmp_path, b"x" * (MAX_REQUEST + 1))
        assert answer["error"]["why"] == f"a line of more than {MAX_REQUEST} bytes"
        _, writer = await asyncio.open_unix_connection(str(tmp_path / SOCKET))
        writer.write(b"half a line")
        writer.close()  # nobody is disturbed


async def test_who_is_not_the_owner_hears_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    async with serving(tmp_path, owner):
        monkeypatch.setattr(owned_daemon.os, "getuid", lambda: os.geteuid() + 1)
        await refused("HP-CTL-001", ask, tmp_path, ControlRequest(do="stop"))
    assert not owner.asked


async def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_daemon, "MAX_CONNECTIONS", 2)
    async with serving(tmp_path, Owner()):
        open_ones = [await asyncio.open_unix_connection(str(tmp_path / SOCKET)) for _ in range(2)]
        for reader, writer in open_ones:
            writer.write(b'{"do": "status"}\n')
            assert await reader.readline()
        await refused("HP-CTL-001", ask, tmp_path, ControlRequest(do="status"))
        open_ones[0][1].close()
        await open_ones[0][1].wait_closed()
        assert await open_ones[0][0].read() == b""
        assert await asyncio.to_thread(ask, tmp_path, ControlRequest(do="status")) == PAUSED
        open_ones[1][1].close()


async def test_who_says_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_daemon, "IDLE_S", 0.05)
    async with serving(tmp_path, Owner()):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / SOCKET))
        assert await asyncio.wait_for(reader.read(), 5.0) == b""
        writer.close()


async def test_who_does_not_read_holds_up_no_end(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as there:
        there.setblocking(False)
        async with serving(tmp_path, Owner()):
            await loop.sock_connect(there, str(tmp_path / SOCKET))
            with contextlib.suppress(TimeoutError):  # until neither side can write
                while True:
                    await asyncio.wait_for(loop.sock_sendall(there, b'{"do": "status"}\n' * 1000), 1.0)
            leaving = loop.time()
        assert loop.time() - leaving < owned_daemon.IDLE_S / 4


async def test_the_owner_learns_that_it_has_ended(tmp_path: Path) -> None:
    stopped = asyncio.Event()

    def wait_for_the_end() -> tuple[bool, bool]:
        with connected(tmp_path) as connection:
            connection.ask(ControlRequest(do="stop"))
            early = connection.ended(0.05)
            loop.call_soon_threadsafe(stopped.set)
            return early, connection.ended(5.0)

    loop = asyncio.get_running_loop()
    async with serving(tmp_path, Owner()):
        waiting = asyncio.ensure_future(asyncio.to_thread(wait_for_the_end))
        await stopped.wait()
    assert await waiting == (False, True)


def test_a_frozen_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "ANSWER_S", 0.05)
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(tmp_path / SOCKET))
        frozen.listen()
        with pytest.raises(LocalError, match="HP-CTL-002"):
            ask(tmp_path, ControlRequest(do="status"))


@pytest.mark.parametrize(
    "line",
    [b"", b"no\n", b"[]\n", b'{"state": 1}\n', b'{"error": {}}\n', b'{"error": 1}\n', b"[" * 60_000],
)
def test_an_answer_that_is_none(line: bytes) -> None:
    with pytest.raises(LocalError, match="HP-CTL-003"):
        decode_answer(line)


def test_an_error_travels() -> None:
    error = {"code": "HP-CTL-009", "what": "what", "why": "why", "fix": "fix"}
    with pytest.raises(LocalError) as caught:
        decode_answer(json.dumps({"error": error}).encode())
    assert caught.value.line() == "HP-CTL-009: what; why: why; do: fix"
    assert caught.value.exit_code == ExitCode.UNEXPECTED, "of an older daemon"


@pytest.mark.parametrize("status", ExitCode)
def test_an_error_travels_with_its_exit_status(status: ExitCode) -> None:
    with pytest.raises(LocalError) as caught:
        decode_answer(encode_error(LocalError("HP-CTL-009", "what", why="why", fix="fix", exit_code=status)))
    assert caught.value.exit_code is status


@pytest.mark.parametrize("status", [None, 6, "3", [], True])
def test_an_exit_status_that_is_none_hides_no_error(status: object) -> None:
    error = {"code": "HP-CTL-009", "what": "what", "why": "why", "fix": "fix", "exit": status}
    with pytest.raises(LocalError, match="HP-CTL-009"):
        decode_answer(json.dumps({"error": error}).encode())
