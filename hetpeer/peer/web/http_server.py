"""A small HTTP server in the daemon's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.process.web_address import Where

SHUTDOWN_S = 1
"""An answer that is under way when the daemon leaves may take so long."""
MAX_CONNECTIONS = 64
TICK_S = 1.0
"""The date of its answers is as old at most. uvicorn looks ten times a second, which was a third of what wakes an idle daemon."""
IDLE_S = 10.0
"""A connection over which nothing is asked for so long is closed."""
LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Nobody's (RFC 5737, 3849): the way to it is that to the network."""


@contextlib.asynccontextmanager
async def served(app: ASGIApp, where: Where) -> AsyncIterator[str]:
    """Serve `app` there while the context is open; its value is the URL, for whoever may get there. Raises `LocalError` HP-WEB-001."""
    listening = _listen(where)
    config = uvicorn.Config(
        app,
        http=_Connection,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        limit_concurrency=MAX_CONNECTIONS + 1,  # those that are answered; idle ones have given way
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        address, actual = _reached_at(listening), listening.getsockname()[1]
        yield f"http://{f'[{address}]' if ':' in address else address}:{actual}"
    finally:
        server.leave()
        await serving
        listening.close()


class _Server(uvicorn.Server):
    """One that leaves the daemon's signals alone, and seldom wakes it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # at 0 of its ten ticks it tells the time
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._leaving.wait()

    def leave(self) -> None:
        """`serve` returns when what is being answered is, after SHUTDOWN_S at most."""
        self.should_exit = True
        self._leaving.set()


class _Connection(H11Protocol):
    """One that ends when it is idle for long: whoever opens many and says nothing locks nobody out."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Where there are too many, the one that has been idle longest gives way."""
        others = [one for one in self.connections if isinstance(one, _Connection)]
        idle = [one for one in others if one.is_idle]
        if len(others) >= MAX_CONNECTIONS and idle:
            min(idle, key=lambda one: one.rests.when()).end()
        super().connection_made(transport)
        self.rests = self.loop.call_later(IDLE_S, self._end_if_idle)
        """Began when nothing was asked any more."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.rests.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.rests.cancel()
        self.rests = self.loop.call_later(IDLE_S, self._end_if_idle)
        super().on_response_complete()

    @property
    def is_idle(self) -> bool:
        """Whether no request is answered now; a part of one is none."""
        return self.cycle is None or self.cycle.response_complete

    def end(self) -> None:
        """At once."""
        self.connections.discard(self)
        self.transport.abort()

    def _end_if_idle(self) -> None:
        if self.is_idle:
            self.end()


def _reached_at(listening: socket.socket) -> str:
    """The address that it listens at; where that is any of this machine's, the one that others see (nothing is sent)."""
    address = str(listening.getsockname()[0])
    if not ipaddress.ip_address(address).is_unspecified:
        return address
    with socket.socket(listening.family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((ELSEWHERE[listening.family], 9))
            return str(asking.getsockname()[0])
        except OSError:  # it is in no network
            return LOOPBACK[listening.family]


def _listen(where: Where) -> socket.socket:
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    try:
        return socket.create_server((where.host, where.port), family=family)
    except OSError as error:
        if where.or_any and error.errno == errno.EADDRINUSE:
            return socket.create_server((where.host, 0), family=family)
        raise LocalError(
            "HP-WEB-001",
            f"cannot listen at {where.host}:{where.port}",
            why=error.strerror or str(error),
            fix="choose another port, or 0 for a free one",
            exit_code=ExitCode.NETWORK,
        ) from error
