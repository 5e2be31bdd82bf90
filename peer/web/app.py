"""The daemon's web application: routes, and who is answered."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

import psutil
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import BaseRoute

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def application(routes: Sequence[BaseRoute], host: str) -> Starlette:
    """Of a server that listens at `host`. It answers to the names of this machine only: to a page of another site whose name was made to
    point here (DNS rebinding) it says 400.
    """
    names = [f"[{name}]" if ":" in name else name for name in (*LOOPBACK, *_own_names(host))]
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)
    return Starlette(routes=list(routes), middleware=[guard])


def _own_names(host: str) -> Iterable[str]:
    """What this machine is called by others, as far as they reach it at `host`."""
    if host in LOOPBACK:
        return
    yield host
    yield socket.gethostname()
    for addresses in psutil.net_if_addrs().values():
        yield from (one.address for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6))
