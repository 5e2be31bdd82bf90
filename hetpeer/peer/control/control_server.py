"""The daemon's end of the control socket: made for its owner alone, and gone with it."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.identity.peer_identity import in_use
from hetpeer.peer.control.control_messages import (
    MAX_REQUEST,
    SOCKET,
    ControlRequest,
    DaemonStatus,
    encode_error,
    not_understood,
    opened,
)

MAX_CONNECTIONS = 16
IDLE_S = 60.0
"""Seconds without a request after which a connection is closed."""
PARTING_S = 1.0
"""Seconds after which a client that does not read its answer is dropped at the end."""
_CREDENTIALS = struct.Struct("3i")

_log = logging.getLogger(__name__)


@asynccontextmanager
async def serving(
    home: Path, answer: Callable[[ControlRequest], DaemonStatus], key: Path | None = None
) -> AsyncIterator[None]:
    """Answer the owner at the socket in the existing folder `home`, until the context ends.

    `key`: the daemon's identity, if it is not a volunteer's. Raises `LocalError` HP-ID-002 when another
    daemon serves this home, HP-DISK-001 where no socket can be made.
    """
    async with AsyncExitStack() as stack:
        folder, address = stack.enter_context(locked(home, key))
        with disk_errors(home / SOCKET):
            listening = stack.enter_context(_bound(folder, address))
        connections = _Connections(answer)
        stack.push_async_callback(connections.close)
        server = await asyncio.start_unix_server(connections.serve, sock=listening, limit=MAX_REQUEST)
        stack.callback(server.close)
        yield


@contextmanager
def locked(home: Path, key: Path | None = None) -> Iterator[tuple[int, str]]:
    """`home` as `opened` does, for this process alone; `key` as `serving` has it.

    Raises `LocalError` HP-ID-002 while another one has it, HP-DISK-001.
    """
    with ExitStack() as stack:
        with disk_errors(home / SOCKET):
            folder, address = stack.enter_context(opened(home))
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise in_use(key or home / "identity.key", home) from error
        yield folder, address


@contextmanager
def _bound(folder: int, address: str) -> Iterator[socket.socket]:
    """The socket, with mode 0600 from the start. We hold the lock, so an old one is a killed daemon's."""
    with suppress(FileNotFoundError):
        os.unlink(SOCKET, dir_fd=folder)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(listening.fileno(), 0o600)
        listening.bind(address)
        try:
            yield listening
        finally:
            with suppress(FileNotFoundError):
                os.unlink(SOCKET, dir_fd=folder)
    finally:
        listening.close()


class _Connections:
    """The open connections, one task each."""

    def __init__(self, answer: Callable[[ControlRequest], DaemonStatus]) -> None:
        self._answer = answer
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._open) < MAX_CONNECTIONS and _user_of(writer) == os.getuid():
                self._open[task] = writer
                await self._converse(reader, writer)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            _log.debug("a control connection ended: %r", error)
        finally:
            self._open.pop(task, None)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            async with asyncio.timeout(IDLE_S):
                try:
                    line = await reader.readuntil()
                except asyncio.LimitOverrunError:
                    writer.write(encode_error(not_understood(f"a line of more than {MAX_REQUEST} bytes")))
                    return
                writer.write(self._answered(line))
                await writer.drain()

    def _answered(self, line: bytes) -> bytes:
        try:
            return self._answer(ControlRequest.decode(line)).encode()
        except LocalError as error:
            return encode_error(error)

    async def close(self) -> None:
        """End them all, once what they asked for is on its way."""
        ending = dict(self._open)
        for writer in ending.values():
            writer.close()  # and its reader comes to an end, when the other side has taken all
        if ending:
            _, late = await asyncio.wait(ending, timeout=PARTING_S)
            for task in late:
                ending[task].transport.abort()
        await asyncio.gather(*ending)


def _user_of(writer: asyncio.StreamWriter) -> int:
    """The user id of the process at the other end, as the kernel says."""
    theirs = writer.get_extra_info("socket")
    raw = theirs.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, user, _group = _CREDENTIALS.unpack(raw)
    assert isinstance(user, int)
    return user
