"""The daemon's web application: routes behind the request guard."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from hetpeer.peer.web.request_guard import RequestGuard


def application(routes: Sequence[BaseRoute], token: str, *, private: bool) -> Starlette:
    """`routes` behind the guard (request_guard.py); `private`: the server is reachable from other
    machines.
    """
    names = [socket.gethostname().lower()]
    guard = Middleware(RequestGuard, token=token, names=names, private=private)
    return Starlette(routes=list(routes), middleware=[guard])
