"""A small HTTP server in the daemon's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

from hetpeer.dht.errors import ExitCode, LocalError
from hetpeer.peer.where import Where

SHUTDOWN_S = 1
"""An answer that is under way when the daemon leaves may take so long."""
MAX_CONNECTIONS = 64


@contextlib.asynccontextmanager
async def served(app: ASGIApp, where: Where) -> AsyncIterator[str]:
    """Serve `app` there while the context is open; its value is the URL. Raises `LocalError` HP-WEB-001."""
    listening = _listen(where)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        address, actual = listening.getsockname()[:2]
        yield f"http://{f'[{address}]' if ':' in address else address}:{actual}"
    finally:
        server.should_exit = True
        await serving
        listening.close()


class _Server(uvicorn.Server):
    """One that leaves the daemon's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
