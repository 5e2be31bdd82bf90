"""Work that goes on whoever waits for it."""

import asyncio
import gc
from typing import Any

import pytest

from hetpeer.dht.base.runtime import TaskSet, going_on


async def fails_after(moment: asyncio.Event) -> int:
    await moment.wait()
    raise OSError("no")


async def test_its_end_is_that_of_the_work() -> None:
    async def work() -> int:
        return 7

    assert await going_on(work()) == 7
    moment = asyncio.Event()
    moment.set()
    with pytest.raises(OSError, match="no"):
        await going_on(fails_after(moment))


async def test_it_has_begun_and_goes_on_without_us() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.sleep(0)
        ended.set()

    waiting = asyncio.ensure_future(going_on(work()))
    await begun.wait()
    waiting.cancel()
    await asyncio.wait_for(ended.wait(), 5.0)


async def test_nobody_is_told_what_nobody_waits_for() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
    moment = asyncio.Event()
    waiting = asyncio.ensure_future(going_on(fails_after(moment)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    moment.set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert waiting.cancelled()
    del waiting
    gc.collect()
    assert not told


async def test_a_task_that_is_spawned_while_its_set_closes_ends_with_it() -> None:
    """The cleanup of a task may say a last word in a task of its own."""
    tasks = TaskSet()
    late: list[asyncio.Task[Any]] = []

    async def with_a_last_word() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            late.append(tasks.spawn(asyncio.Event().wait(), name="last word"))

    tasks.spawn(with_a_last_word(), name="first")
    await asyncio.sleep(0)
    await tasks.close()
    assert [task.cancelled() for task in late] == [True]
