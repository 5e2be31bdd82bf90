"""Guard of the web server against foreign pages and strangers, and the token that it asks for.

A page of another site can make a browser send requests to this machine, and with a name that points here (DNS
rebinding) they look like our own. Therefore:

- the Host must be an address, `localhost` or a chosen name;
- a change needs the token and no foreign Origin;
- a server that listens beyond this machine gives only static files to requests without the token;
- requests without CORS have no Origin, and are judged by Sec-Fetch-Site.

The token is made once and kept in the daemon's folder for the owner, so that open pages survive a restart.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import secrets
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetpeer.bootstrap.run.durable_files import atomic_write
from hetpeer.dht.base.errors import LocalError

TOKEN_FILE = "dashboard.token"  # noqa: S105 - a name
TOKEN_BYTES = 18
_TOKEN_FORM = re.compile(r"[A-Za-z0-9_-]{20,64}")
SAFE = frozenset({"GET", "HEAD"})
OPEN = ("/static/", "/healthz")
"""Paths that need no token, besides the page itself, which is empty without its data."""
FOREIGN = frozenset({"cross-site", "same-site"})
"""Values of Sec-Fetch-Site for requests of another site, port or name. Only browsers send it."""
ALWAYS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors "
    "'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

_log = logging.getLogger(__name__)


def token_of(folder: Path) -> str:
    """The token in `folder`; new if missing, damaged or readable by others.

    Without room on the disk it lasts for this start only. Raises `LocalError` HP-DISK-001.
    """
    path = folder / TOKEN_FILE
    try:
        if not path.stat().st_mode & 0o077 and _TOKEN_FORM.fullmatch(kept := path.read_text().strip()):
            return kept
    except (OSError, UnicodeDecodeError):
        pass
    made = secrets.token_urlsafe(TOKEN_BYTES)
    try:
        atomic_write(path, made.encode(), mode=0o600)
    except LocalError as error:
        if error.code != "HP-DISK-002":
            raise
        _log.warning("%s finds no room: the page has another link after the next start", path)
    return made


class RequestGuard:
    """ASGI middleware. `names`: further allowed host names; `private`: reading needs the token as well."""

    def __init__(self, app: ASGIApp, token: str, *, names: Iterable[str] = (), private: bool) -> None:
        self._app = app
        self._token = token.encode()
        self._names = frozenset({"localhost", *names})
        self._private = private

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(Request(scope))

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(ALWAYS)
            await send(message)

        answer = self._app if refusal is None else refusal
        await answer(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> JSONResponse | None:
        """Refusal of a foreign host name, another site, or a missing token; None for a permitted request."""
        if not self._is_ours(request.headers.get("host", "")):
            return _refused(421, "this server does not go by that name")
        path, origin = request.url.path, request.headers.get("origin")
        foreign = path != "/" and request.headers.get("sec-fetch-site") in FOREIGN
        if foreign or origin not in (None, f"{request.url.scheme}://{request.headers['host']}"):
            return _refused(403, "requests from other sites are refused")
        reading = request.method in SAFE
        if reading and (not self._private or path == "/" or path.startswith(OPEN)):
            return None
        if not hmac.compare_digest(
            _token(request.headers, request.query_params.get("token", "")), self._token
        ):
            return _refused(
                401, "the daemon's token is missing or wrong: open the whole link that hetpeer printed"
            )
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header names this machine by address, or by one of its names."""
        name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
        if name.lower() in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _token(headers: Headers, asked: str) -> bytes:
    """Token of a request: from its header, or from its address, since an event source can send no header."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return (given if scheme.lower() == "bearer" else asked).encode()


def _refused(status: int, why: str) -> JSONResponse:
    return JSONResponse({"error": why}, status_code=status)


def application(routes: Sequence[BaseRoute], token: str, *, private: bool) -> Starlette:
    """`routes` behind the guard; `private`: the server is reachable from other machines."""
    names = [socket.gethostname().lower()]
    guard = Middleware(RequestGuard, token=token, names=names, private=private)
    return Starlette(routes=list(routes), middleware=[guard])
