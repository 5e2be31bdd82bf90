"""Streams over socket pairs that can be cut: what a Node opens, without the network."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.streams.byte_transport import ByteTransport
from hetpeer.dht.streams.stream import Stream


class Loopback:
    """The part of a Node that `dial` uses: each `open` gives one end of a pair, `handle` the other."""

    def __init__(self, handle: Callable[[Stream], Awaitable[None]], dialler: str = "us") -> None:
        self.handle = handle
        self.dialler = dialler
        self.direct = SimpleNamespace(leads={})
        self.opened = 0
        self.ends: list[Stream] = []
        self.ended: list[RemoteError] = []
        """Why streams were over on the side that serves."""
        self._tasks: set[asyncio.Task[None]] = set()

    def reaching(self, _peer: str) -> AbstractContextManager[None]:
        return nullcontext()

    async def open(self, _peer: str, protocol: str, *, timeout_s: float) -> Stream:
        self.opened += 1
        ends = []
        for end in socket.socketpair(socket.AF_UNIX):
            _, wire = await asyncio.get_running_loop().create_unix_connection(ByteTransport, sock=end)
            ends.append(Stream(wire, peer_id=self.dialler if ends else "them", protocol=protocol))
        self.ends = ends
        task = asyncio.create_task(self._serve(ends[1]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ends[0]

    async def _serve(self, stream: Stream) -> None:
        try:
            async with stream:
                await self.handle(stream)
        except RemoteError as error:
            self.ended.append(error)  # what a listener does with it: this stream is over

    def cut(self) -> None:
        for end in self.ends:
            end.abort()
