"""What the page asks for: real requests to a real server, as many at once as there may be and more."""

import asyncio
from collections import Counter
from typing import Any

from hetpeer.peer.limits.web_address import Where
from hetpeer.peer.web import dashboard_page
from hetpeer.peer.web.dashboard_page import ViewFeed, page_routes
from hetpeer.peer.web.http_server import served
from hetpeer.peer.web.request_guard import application

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def look(_watched: bool) -> dict[str, Any]:
    return {"schema": "of a test"}


async def opened(port: int) -> tuple[int, Stream]:
    """The status of an event stream that is asked for, and the stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    line = await asyncio.wait_for(reader.readline(), 10)
    return int(line.split()[1]), (reader, writer)


async def test_sixteen_pages_are_served_and_no_further_one_though_all_ask_at_once() -> None:
    made = ViewFeed(look)
    app = application(page_routes(made, {}, lambda: None), "token-of-a-test", private=False)
    running = asyncio.create_task(made.run())
    async with served(app, Where("127.0.0.1", 0)) as url:
        port = int(url.rpartition(":")[2])
        answers = await asyncio.gather(*(opened(port) for _ in range(2 * dashboard_page.MAX_WATCHERS)))
        full = dashboard_page.MAX_WATCHERS
        assert Counter(status for status, _ in answers) == {200: full, 503: full}
        status, (reader, writer) = await opened(port)
        assert status == 503
        assert b"too many pages are open" in await asyncio.wait_for(reader.readuntil(b"}"), 10)
        writer.close()

        reader, writer = next(stream for status, stream in answers if status == 200)
        assert b'data: {"schema":"of a test"}' in await asyncio.wait_for(reader.readuntil(b"\n\n"), 10)
        writer.close()  # a page is closed: another one may come
        async with asyncio.timeout(10):
            while (again := await opened(port))[0] == 503:
                again[1][1].close()
        assert again[0] == 200
        for _, (_, writer) in [*answers, again]:
            writer.close()
        await made.close()
    running.cancel()
