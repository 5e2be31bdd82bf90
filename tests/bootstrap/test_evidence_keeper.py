"""Lines on their way to the disk: beside the loop, in order, no volunteer in the way of another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from hetpeer.bootstrap.log import evidence_room
from hetpeer.bootstrap.log.evidence_room import RESERVE
from hetpeer.bootstrap.log.volunteer_log_files import VolunteerLogs
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.service.evidence_keeper import BACKLOG, EvidenceKeeper
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.identity.peer_identity import Identity
from tests.bootstrap.test_volunteer_log_files import applied, committed, lines_in, logs_of, sign_event


@asynccontextmanager
async def running(logs: VolunteerLogs) -> AsyncIterator[EvidenceKeeper]:
    keeper = EvidenceKeeper(logs)
    task = asyncio.create_task(keeper.run())
    yield keeper
    task.cancel()
    await asyncio.wait([task])


def told(run: RunDirectory, who: Identity, *numbers: int, more: int = 0) -> list[str]:
    return [sign_event(applied(run, who, incarnation=one, x="x" * more), who) for one in numbers]


async def test_lines_are_checked_beside_the_loop_in_order_and_a_false_one_is_told_with_the_next(
    fresh: RunDirectory, volunteers: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = volunteers
    logs = logs_of(fresh)
    logs.recorded(committed(fresh, 0, one, two))
    keep: Callable[[str, str], bool] = logs.keep
    seen: set[int] = set()

    def noted(peer: str, line: str) -> bool:
        seen.add(threading.get_ident())
        return keep(peer, line)

    monkeypatch.setattr(logs, "keep", noted)
    first, second = told(fresh, one, *range(20)), told(fresh, two, *range(20))
    async with running(logs) as keeper:
        for line, other in zip(first, second, strict=True):
            await keeper.put(one.peer_id, line)
            await keeper.put(two.peer_id, other)
        await keeper.put(two.peer_id, first[0])
        await keeper.idle()
        with pytest.raises(ProtocolError):
            await keeper.put(two.peer_id, second[0])
        await keeper.put(two.peer_id, second[0])
        await keeper.put(one.peer_id, first[0])
        await keeper.idle()
    assert (lines_in(fresh, one), lines_in(fresh, two)) == (first, second)
    assert threading.get_ident() not in seen


async def test_whoever_sends_faster_than_its_lines_are_written_waits_alone(
    fresh: RunDirectory, volunteers: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy, modest = volunteers
    logs = logs_of(fresh)
    logs.recorded(committed(fresh, 0, greedy, modest))
    keep: Callable[[str, str], bool] = logs.keep
    gate = threading.Event()

    def slowly(peer: str, line: str) -> bool:
        gate.wait()
        return keep(peer, line)

    monkeypatch.setattr(logs, "keep", slowly)
    lines = told(fresh, greedy, *range(9), more=50_000)
    async with running(logs) as keeper:
        put = 0

        async def send() -> None:
            nonlocal put
            for line in lines:
                await keeper.put(greedy.peer_id, line)
                put += 1

        sending = asyncio.create_task(send())
        for _ in range(50):
            await asyncio.sleep(0)
        assert put == BACKLOG // len(lines[0]) + 1
        for line in told(fresh, modest, 1, 2):
            await asyncio.wait_for(keeper.put(modest.peer_id, line), 5)
        gate.set()
        await asyncio.wait([sending])
        await keeper.idle()
    assert len(lines_in(fresh, modest)) == 2


async def test_after_a_full_disk_what_was_dropped_comes_first(
    fresh: RunDirectory,
    volunteers: list[Identity],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    who, free = volunteers[0], [RESERVE + (1 << 30)]
    monkeypatch.setattr(evidence_room, "free_bytes", lambda _: free[0])
    logs = logs_of(fresh)
    logs.recorded(committed(fresh, 0, who))
    lines = told(fresh, who, *range(6))
    async with running(logs) as keeper:
        await keeper.put(who.peer_id, lines[0])
        await keeper.idle()
        free[0] = RESERVE
        for line in lines[1:3]:
            await keeper.put(who.peer_id, line)
        await keeper.idle()
        assert keeper.to_ask() == []
        assert caplog.text.count("HP-DISK-006") == 1
        free[0] += 1 << 30
        assert keeper.to_ask() == [who.peer_id]
        assert await keeper.last(who.peer_id, again=True) == lines[0]
        await keeper.put(who.peer_id, lines[3])  # it was on its way before the volunteer heard of it
        for line in lines[1:]:
            await keeper.put(who.peer_id, line)
        assert await keeper.last(who.peer_id, again=True) == lines[-1]
        assert keeper.to_ask() == []
    assert lines_in(fresh, who) == lines
