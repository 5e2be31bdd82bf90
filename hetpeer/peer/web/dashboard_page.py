"""Routes of the dashboard: its files, the view, the stream of views, and the orders of its buttons.

`ViewFeed` has the newest view of the swarm for all watchers: renewed every second while somebody watches,
else seldom.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

LOOK_S = 1.0
GAP_S = 0.25
"""Least seconds between two looks."""
IDLE_S = 10.0
"""Seconds between two looks without watchers, for the events; the log is not asked for then."""
SHOWN_S = 30.0
"""Seconds for which a reader of a single view counts as a watcher."""
MAX_WATCHERS = 16

FILES = Path(__file__).with_name("static")

_log = logging.getLogger(__name__)


class ViewFeed:
    """Views made by `look(somebody watches)`. After a failure the last view stays; the log has the error."""

    def __init__(self, look: Callable[[bool], Awaitable[dict[str, Any]]]) -> None:
        self._look = look
        self._newest: str | None = None
        self._news = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._watchers = 0
        self._shown_at = -math.inf
        self._closed = False
        self._failure = ""
        """Error of the last look, logged once."""

    @contextlib.contextmanager
    def seat(self) -> Iterator[bool]:
        """A seat for `watch` while the context is open; its value is whether one was free."""
        if self._watchers >= MAX_WATCHERS:
            yield False
            return
        self._watchers += 1
        self._wanted.set()
        try:
            yield True
        finally:
            self._watchers -= 1

    @property
    def _is_watched(self) -> bool:
        return self._watchers > 0 or time.monotonic() - self._shown_at < SHOWN_S

    async def run(self) -> None:
        """Look again and again; the feed is closed at the end. Never returns."""
        try:
            while True:
                self._wanted.clear()
                await self._renew()
                await self._pause()
        finally:
            await self.close()

    async def _renew(self) -> None:
        """Make a new view and wake those that wait for it; an error is logged once."""
        try:
            view = json.dumps(await self._look(self._is_watched), separators=(",", ":"), allow_nan=False)
        except Exception as error:  # noqa: BLE001 - the next look may succeed
            if repr(error) != self._failure:
                _log.error("no new view of the swarm", exc_info=error)
            self._failure = repr(error)
            return
        self._failure = ""
        async with self._news:
            self._newest = view
            self._news.notify_all()

    async def close(self) -> None:
        """End the watchers' streams, so that the server can stop."""
        self._closed = True
        async with self._news:
            self._news.notify_all()

    def look_now(self) -> None:
        """Look at once after a change, if somebody watches."""
        if self._is_watched:
            self._wanted.set()

    def shown(self) -> str | None:
        """The newest view for a single request, which counts as watching for SHOWN_S."""
        if not self._is_watched:
            self._wanted.set()
        self._shown_at = time.monotonic()
        return self._newest

    async def watch(self) -> AsyncIterator[str]:
        """Each new view as JSON, beginning with the newest; a slow reader misses some. Needs a `seat`."""
        shown: str | None = None
        while True:
            async with self._news:
                while not self._closed and (self._newest is shown or self._newest is None):
                    await self._news.wait()
                if self._closed or self._newest is None:
                    return
                shown = self._newest
            yield shown

    async def _pause(self) -> None:
        """Wait until the next look is due or wanted."""
        await asyncio.sleep(GAP_S)
        try:
            async with asyncio.timeout((LOOK_S if self._is_watched else IDLE_S) - GAP_S):
                await self._wanted.wait()
        except TimeoutError:
            return


Orders = Mapping[str, Callable[[], object]]
"""Name of an order → function that carries it out."""


def page_routes(feed: ViewFeed, orders: Orders, picture: Callable[[], str | None]) -> list[BaseRoute]:
    """The page at `/` and its API under `/api/v1`. A watcher's page has no `orders`.

    `picture`: the map of the swarm as SVG, None before there is one.
    """

    async def page(_request: Request) -> Response:
        return FileResponse(FILES / "index.html")

    async def health(_request: Request) -> Response:
        return PlainTextResponse("ok")

    async def view(_request: Request) -> Response:
        newest = feed.shown()
        if newest is None:
            return JSONResponse({"error": "the swarm has not answered yet"}, status_code=503)
        return Response(newest, media_type="application/json")

    async def swarm_map(_request: Request) -> Response:
        drawn = picture()
        if drawn is None:
            return JSONResponse({"error": "the swarm has not answered yet"}, status_code=503)
        return Response(drawn, media_type="image/svg+xml")

    async def events(_request: Request) -> Response:
        return _Events(_as_events(feed), feed)

    async def order(request: Request) -> Response:
        ask = orders.get(request.path_params["what"])
        if ask is None:
            return JSONResponse({"error": "this daemon has no such order"}, status_code=404)
        ask()
        feed.look_now()
        return Response(status_code=204)

    return [
        Route("/", page),
        Mount("/static", StaticFiles(directory=FILES)),
        Route("/healthz", health),
        Route("/api/v1/view", view),
        Route("/api/v1/map.svg", swarm_map),
        Route("/api/v1/events", events),
        Route("/api/v1/{what}", order, methods=["POST"]),
    ]


class _Events(StreamingResponse):
    """Stream of the views of `feed`. A seat is checked and taken at once, so no two requests get the same."""

    def __init__(self, content: AsyncIterator[str], feed: ViewFeed) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.seat() as free:
            if free:
                await super().__call__(scope, receive, send)
                return
        full = JSONResponse({"error": "too many pages are open"}, status_code=503)
        await full(scope, receive, send)


async def _as_events(feed: ViewFeed) -> AsyncIterator[str]:
    """Server-sent events, one for each view."""
    async for view in feed.watch():
        yield f"event: view\ndata: {view}\n\n"
