"""Who looks at a swarm gets its newest view."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from hetpeer.dht.base.errors import RemoteError
from hetpeer.peer.web import dashboard_page
from hetpeer.peer.web.dashboard_page import ViewFeed


@pytest.fixture(autouse=True)
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the next look of an idle feed waits too long."""
    monkeypatch.setattr(dashboard_page, "IDLE_S", 600.0)


class Source:
    """Counts how often it is looked at; fails for the looks in `failing`."""

    def __init__(self, failing: frozenset[int] = frozenset()) -> None:
        self.looks = 0
        self.watched: list[bool] = []
        self._failing = failing

    async def look(self, watched: bool) -> dict[str, Any]:
        self.looks += 1
        self.watched.append(watched)
        if self.looks in self._failing:
            raise RemoteError("HP-NET-012", "the network does not answer", why="a test", fix="wait")
        return {"look": self.looks}


async def first(made: ViewFeed) -> None:
    """Return when there is a view."""
    async with asyncio.timeout(60):
        while made._newest is None:
            await asyncio.sleep(0.01)


async def views(made: ViewFeed, count: int) -> list[int]:
    """What the next `count` views say."""
    found: list[int] = []
    with made.seat() as free:
        assert free
        async with contextlib.aclosing(made.watch()) as watching:
            async for view in watching:
                found.append(json.loads(view)["look"])
                if len(found) == count:
                    break
    return found


async def test_a_watcher_wakes_an_idle_feed_and_gets_each_view() -> None:
    source = Source()
    made = ViewFeed(source.look)
    running = asyncio.create_task(made.run())
    try:
        await first(made)
        async with asyncio.timeout(60):
            assert await views(made, 3) == [1, 2, 3]
        assert source.watched == [False, True, True]
    finally:
        running.cancel()


async def test_a_swarm_that_does_not_answer_leaves_the_last_view() -> None:
    source = Source(failing=frozenset({2}))
    made = ViewFeed(source.look)
    running = asyncio.create_task(made.run())
    try:
        assert await views(made, 2) == [1, 3]
    finally:
        running.cancel()


async def test_a_feed_that_closes_ends_every_stream() -> None:
    made = ViewFeed(Source().look)
    running = asyncio.create_task(made.run())
    watching = made.watch()
    async with asyncio.timeout(60):
        assert json.loads(await anext(watching)) == {"look": 1}
        await made.close()
        with pytest.raises(StopAsyncIteration):
            await anext(watching)
    running.cancel()


async def test_what_is_no_json_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    """A number that is none would end the page of everybody who looks.

    It is told once, and the next view is shown.
    """
    looks = 0

    async def look(_watched: bool) -> dict[str, float]:
        nonlocal looks
        looks += 1
        return {"look": float("inf") if looks in (2, 3) else looks}

    made = ViewFeed(look)
    running = asyncio.create_task(made.run())
    try:
        async with asyncio.timeout(60):
            assert await views(made, 2) == [1, 4]
    finally:
        running.cancel()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "JSON" in caplog.text


async def test_who_asks_for_one_view_is_somebody_who_watches() -> None:
    source = Source()
    made = ViewFeed(source.look)
    running = asyncio.create_task(made.run())
    try:
        await first(made)
        assert made.shown() == made._newest
        async with asyncio.timeout(60):
            while source.looks < 3:
                await asyncio.sleep(0.01)
        assert source.watched[:3] == [False, True, True]
    finally:
        running.cancel()


def test_so_many_may_watch() -> None:
    made = ViewFeed(Source().look)
    with contextlib.ExitStack() as stack:
        assert all(stack.enter_context(made.seat()) for _ in range(dashboard_page.MAX_WATCHERS))
        with made.seat() as free:
            assert not free
    with made.seat() as free:
        assert free


async def test_what_changes_here_is_seen_before_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """By who watches; and a flood of changes is no flood of looks."""
    monkeypatch.setattr(dashboard_page, "LOOK_S", 600.0)
    source = Source()
    made = ViewFeed(source.look)
    running = asyncio.create_task(made.run())
    try:
        await first(made)
        made.look_now()
        await asyncio.sleep(2 * dashboard_page.GAP_S)
        assert source.looks == 1, "nobody watches"
        with made.seat():
            async with asyncio.timeout(60):
                while source.looks < 2:
                    await asyncio.sleep(0.01)
                began = asyncio.get_running_loop().time()
                while source.looks < 6:
                    made.look_now()
                    await asyncio.sleep(0.01)
            assert asyncio.get_running_loop().time() - began >= 3 * dashboard_page.GAP_S
    finally:
        running.cancel()
