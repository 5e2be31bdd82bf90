"""Incoming streams: a unix socket of ours to which p2pd connects each of them, and the handlers behind it.

The socket and the handlers outlive any one p2pd; a restarted one is only told the path again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from hetpeer.dht.control import read_stream_info, stream_info
from hetpeer.dht.errors import PeerLostError, RemoteError
from hetpeer.dht.streams import Stream
from hetpeer.dht.tasks import TaskSet
from hetpeer.dht.wire import Wire

Handler = Callable[[Stream], Awaitable[None]]

MAX_STREAMS_PER_PEER = 64
MAX_STREAMS = 1024
"""Open incoming streams; each costs two file descriptors here and a buffer of 16 KiB."""
_INTRODUCTION_DEADLINE_S = 5.0

_log = logging.getLogger(__name__)


class Listener:
    """Accepts streams and runs one handler task for each. A stream ends when its handler does."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="hetpeer-"))  # mode 0700
        self._server: asyncio.Server | None = None
        self._open: Counter[str] = Counter()
        self._tasks = TaskSet()

    @property
    def path(self) -> str:
        return str(self._folder / "streams.sock")

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Wire(self._accept), self.path)

    async def close(self) -> None:
        """Accept no more, cancel the handlers and wait for them. Idempotent."""
        if self._server is not None:
            self._server.close()
        await self._tasks.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def open_own(self, peer_id: str, protocol: str) -> Stream:
        """A stream to ourselves: libp2p refuses to dial its own id, so we play p2pd's part. Raises `PeerLostError`."""
        try:
            _, wire = await asyncio.get_running_loop().create_unix_connection(Wire, self.path)
        except OSError as error:
            raise PeerLostError(peer_id, error.strerror or str(error)) from error
        await wire.write([stream_info(peer_id, protocol)])
        return Stream(wire, peer_id=peer_id, protocol=protocol)

    def __len__(self) -> int:
        """Open incoming streams."""
        return self._open.total()

    def _accept(self, wire: Wire) -> None:
        self._tasks.spawn(self._serve(wire), name="incoming stream")

    async def _serve(self, wire: Wire) -> None:
        try:
            async with asyncio.timeout(_INTRODUCTION_DEADLINE_S):
                peer_id, protocol = await read_stream_info(wire)
        except (RemoteError, TimeoutError) as error:
            _log.debug("p2pd handed over no stream: %s", error)
            wire.abort()
            return
        except asyncio.CancelledError:
            wire.abort()
            raise
        handler = self.handlers.get(protocol)
        if (
            handler is None
            or self._open[peer_id] >= MAX_STREAMS_PER_PEER
            or self._open.total() >= MAX_STREAMS
        ):
            _log.debug("refused a stream of %s from %s: %d open", protocol, peer_id, self._open[peer_id])
            wire.abort()
            return
        self._open[peer_id] += 1
        try:
            async with Stream(wire, peer_id=peer_id, protocol=protocol) as stream:
                await handler(stream)
        finally:
            self._open[peer_id] -= 1
            if not self._open[peer_id]:
                del self._open[peer_id]
