"""Routes of the dashboard: its files, the view, the stream of views, and the orders of its buttons."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from hetpeer.peer.web.view_feed import ViewFeed

FILES = Path(__file__).with_name("static")

Orders = Mapping[str, Callable[[], object]]
"""Name of an order → function that carries it out."""


def page_routes(feed: ViewFeed, orders: Orders) -> list[BaseRoute]:
    """The page at `/` and its API under `/api/v1`. A watcher's page has no `orders`."""

    async def page(_request: Request) -> Response:
        return FileResponse(FILES / "index.html")

    async def health(_request: Request) -> Response:
        return PlainTextResponse("ok")

    async def view(_request: Request) -> Response:
        newest = feed.shown()
        if newest is None:
            return JSONResponse({"error": "the swarm has not answered yet"}, status_code=503)
        return Response(newest, media_type="application/json")

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
