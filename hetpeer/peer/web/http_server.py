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
from hetpeer.peer.limits.web_address import Where

SHUTDOWN_S = 1
"""Seconds that an answer in progress may take when the daemon leaves."""
MAX_CONNECTIONS = 64
TICK_S = 1.0
"""Seconds between uvicorn's ticks (renewing the date); its ten a second were a third of idle wake-ups."""
IDLE_S = 10.0
"""Seconds after which an idle connection is closed."""
LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses of nobody (RFC 5737, 3849): the route to them shows our address in the network."""


@contextlib.asynccontextmanager
async def served(app: ASGIApp, where: Where) -> AsyncIterator[str]:
    """Serve `app` at `where` while the context is open; yields the URL. Raises `LocalError` HP-WEB-001."""
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
        # one more than MAX_CONNECTIONS gets a 503, if none was idle: _Connection closes an idle one first
        limit_concurrency=MAX_CONNECTIONS + 1,
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
    """A uvicorn server that does not take over signals and seldom wakes the daemon."""

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
        """Let `serve` return after the answers in progress, at most SHUTDOWN_S from now."""
        self.should_exit = True
        self._leaving.set()


class _Connection(H11Protocol):
    """A connection that ends after IDLE_S without a request, so that idle ones cannot lock others out."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the connection that has been idle longest if there are too many."""
        others = [one for one in self.connections if isinstance(one, _Connection)]
        idle = [one for one in others if one.is_idle]
        if len(others) >= MAX_CONNECTIONS and idle:
            min(idle, key=lambda one: one.rests.when()).end()
        super().connection_made(transport)
        self.rests = self.loop.call_later(IDLE_S, self._end_if_idle)
        """Timer of the idle time."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.rests.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.rests.cancel()
        self.rests = self.loop.call_later(IDLE_S, self._end_if_idle)
        super().on_response_complete()

    @property
    def is_idle(self) -> bool:
        """Whether no complete request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def end(self) -> None:
        """Close the server at once."""
        self.connections.discard(self)
        self.transport.abort()

    def _end_if_idle(self) -> None:
        if self.is_idle:
            self.end()


def _reached_at(listening: socket.socket) -> str:
    """Address it listens at; if that is unspecified, the one that others see (nothing is sent to find it)."""
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
