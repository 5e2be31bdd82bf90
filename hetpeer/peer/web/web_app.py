"""The daemon's web application: routes, and who is answered."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from hetpeer.peer.web.request_guard import RequestGuard


def application(routes: Sequence[BaseRoute], token: str, *, private: bool) -> Starlette:
    """Behind a guard (request_guard.py); `private`: others than this machine's users reach it."""
    names = [socket.gethostname().lower()]
    guard = Middleware(RequestGuard, token=token, names=names, private=private)
    return Starlette(routes=list(routes), middleware=[guard])
