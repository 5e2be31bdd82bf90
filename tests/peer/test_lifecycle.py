"""Starting takes seconds, and whoever presses Ctrl-C meanwhile is heard."""

import asyncio

import pytest

from hetpeer.peer.lifecycle import unless


async def test_work_that_is_done_counts() -> None:
    async def work() -> int:
        return 7

    assert await unless(asyncio.Event().wait(), work()) == 7


async def test_leaving_cancels_and_waits_for_the_end() -> None:
    leaving, ended = asyncio.Event(), []

    async def work() -> int:
        try:
            leaving.set()
            await asyncio.Event().wait()
            return 1
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    assert await asyncio.wait_for(unless(leaving.wait(), work()), 5) is None
    assert ended == ["cleaned up"]


async def test_an_error_is_the_works_own() -> None:
    async def work() -> int:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await unless(asyncio.Event().wait(), work())
