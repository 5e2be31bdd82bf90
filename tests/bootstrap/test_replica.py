"""A reliable peer's two files: decided records, and what it has promised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from hetpeer.bootstrap.consensus.raft_messages import Append, LogEntry
from hetpeer.bootstrap.consensus.reconfiguration import Reconfiguration
from hetpeer.bootstrap.consensus.replica import Replica, run_logs
from hetpeer.bootstrap.log.record_log import Log, read_log
from hetpeer.bootstrap.run.amendment import Amendment, sign_amendment
from hetpeer.bootstrap.run.membership_config import FILE, MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.state.effects import Halt
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.peer.reliable.reliable_peer import ReliablePeer
from tests.swarm.swarm import resign

DECIDED = {"kind": "halt", "why": "the first"}


@asynccontextmanager
async def leading(run: RunDirectory) -> AsyncIterator[Replica]:
    """The only reliable peer of `run`, once it leads."""
    node = await Node.start(NodeConfig(), Identity.load(run.identity_path))
    try:
        with run_logs(run) as logs:
            replica = Replica(node, run, MembershipConfig(run.signed, run.path), logs, SystemClock())
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(replica.run())
                await replica.leading()
                yield replica
                running.cancel()
    finally:
        await node.close()


async def lead(run: RunDirectory, record: Mapping[str, Any] | None = None) -> None:
    """Be the only reliable peer of `run` until it leads and `record` is decided."""
    async with leading(run) as replica:
        if record is not None:
            await replica.record(record)


@pytest.mark.swarm
def test_a_ledger_that_tells_another_story_than_the_journal_stops_the_run(fresh: RunDirectory) -> None:
    """For instance if one of the two files is restored from another day."""
    uvloop.run(lead(fresh, DECIDED))
    assert list(read_log(fresh.log_path)) == [DECIDED]
    uvloop.run(lead(fresh))
    fresh.log_path.unlink()
    ledger = Log.open(fresh.log_path)
    ledger.append({"kind": "halt", "why": "another"})
    ledger.close()
    with pytest.RaisesGroup(pytest.RaisesGroup(LocalError)) as caught:
        uvloop.run(lead(fresh))
    error = caught.value.exceptions[0].exceptions[0]
    assert isinstance(error, LocalError)
    assert error.line().startswith(f"HP-LOG-003: {fresh.log_path} does not tell what was decided: record 0 ")
    assert error.exit_code == ExitCode.VERSION
    assert "of several, name another in its place (hetpeer amend)" in error.fix


@pytest.mark.swarm
def test_a_ledger_that_was_moved_away_is_told_again(fresh: RunDirectory) -> None:
    """What HP-LOG-001 says about a damaged one whose journal is sound."""
    uvloop.run(lead(fresh, DECIDED))
    whole = fresh.log_path.read_bytes()
    fresh.log_path.unlink()
    uvloop.run(lead(fresh))
    assert fresh.log_path.read_bytes() == whole


async def looked_at_while_it_is_written(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Replica:
    """Records and history at the moment when a record is on the disk, and the event loop has not
    heard of it.
    """
    written, looked = threading.Event(), threading.Event()
    append = Log.append

    def slow(log: Log, *records: Mapping[str, Any]) -> None:
        append(log, *map(dict, records))
        if log.path == run.log_path:
            written.set()
            assert looked.wait(10.0)

    async with leading(run) as replica:
        monkeypatch.setattr(Log, "append", slow)
        recording = asyncio.ensure_future(replica.record({"kind": "reign", "term": 7}))
        await asyncio.to_thread(written.wait, 10.0)
        assert len(list(read_log(run.log_path))) == 1
        assert (len(replica.records), list(replica.records), replica.records[-1:]) == (0, [], [])
        assert replica.history.term == 0
        looked.set()
        await recording
        assert list(replica.records) == [{"kind": "reign", "term": 7}]
        assert replica.history.term == 7
    return replica


@pytest.mark.swarm
def test_what_is_folded_has_the_records_that_there_are(
    fresh: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower that compares their number with what it has seen misses none.

    One once missed the run's end.
    """
    replica = uvloop.run(looked_at_while_it_is_written(fresh, monkeypatch))
    assert len(replica.records) == 1
    with pytest.raises(LocalError):
        replica.records[0]  # the files are closed


async def amend_anew(run: RunDirectory, latest: bytes) -> None:
    """Lead again, until the directory's amendment is `latest`."""
    node = await Node.start(NodeConfig(), Identity.load(run.identity_path))
    membership = MembershipConfig(run.signed, run.path)
    try:
        with run_logs(run) as logs:
            replica = Replica(node, run, membership, logs, SystemClock())
            works = [asyncio.ensure_future(replica.run())]
            await replica.leading()
            works.append(asyncio.ensure_future(Reconfiguration(node, replica, lambda: 0).run()))
            async with asyncio.timeout(5.0):
                while membership.data != latest:
                    await asyncio.sleep(0.01)
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
    finally:
        await node.close()


@pytest.mark.swarm
def test_the_recorded_one_of_two_amendments_with_one_number_is_not_undone(fresh: RunDirectory) -> None:
    recorded, other = (
        sign_amendment(
            Amendment(
                run_id=fresh.run_id, sequence=1, coordinators=fresh.manifest.coordinators, banned=(banned,)
            ),
            fresh.owner_key(),
        )
        for banned in ("1" * 12, "2" * 12)
    )
    record = {"kind": "amendment", "sequence": 1, "data": recorded.hex()}
    uvloop.run(lead(fresh, record))
    (fresh.path / FILE).write_bytes(other)
    uvloop.run(amend_anew(fresh, recorded))
    assert list(read_log(fresh.log_path)) == [record]
    assert MembershipConfig(fresh.signed, fresh.path).data == recorded


async def outcomes(run: RunDirectory, leader: str) -> list[Halt | None]:
    """The end of the run for a reliable peer that missed a halt, after each message of the leader."""
    node = await Node.start(NodeConfig(), Identity.load(run.identity_path))
    first = [None, {"kind": "reign", "term": 1}, DECIDED]
    again = [None, {"kind": "reign", "term": 2}]
    last = [{"kind": "halt", "why": "the second"}]
    found, begin, last_term = [], 0, 0
    try:
        with run_logs(run) as logs:
            replica = Replica(node, run, MembershipConfig(run.signed, run.path), logs, SystemClock())
            peer = ReliablePeer(node, run, replica)
            running = asyncio.ensure_future(replica.run())
            for term, records, decided in ((1, first, 5), (2, again, 5), (2, last, 6)):
                entries = tuple(LogEntry(term=term, record=record) for record in records)
                message = Append(term=2, begin=begin, last_term=last_term, entries=entries, committed=decided)
                replica.received(leader, message)
                begin, last_term = begin + len(entries), term
                found.append(await peer._outcome())
                known = sum(record is not None for record in (first + again + last)[:begin])
                while len(replica.records) < known:
                    await asyncio.sleep(0.01)
                    found.append(await peer._outcome())
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        await node.close()
    return found


@pytest.mark.swarm
def test_a_halt_after_which_the_run_went_on_is_not_its_end(fresh: RunDirectory, tmp_path: Path) -> None:
    """A new reliable peer, or one that was away, is told of the halt as of all decided records."""
    me = Identity.load(fresh.identity_path).peer_id
    others = [Identity.create(tmp_path / name).peer_id for name in "bc"]
    run = resign(fresh, coordinators=(me, *others))
    *before, end = uvloop.run(outcomes(run, others[0]))
    assert before
    assert not any(before)
    assert end == Halt("the second", completed=False)


async def fsyncs(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, count: int) -> tuple[int, list[Any]]:
    """Writes of both files while that many records are recorded at a time, and the records then."""
    writes, append = 0, Log.append

    def counts(log: Log, *records: dict[str, Any]) -> None:
        nonlocal writes
        writes += 1
        append(log, *records)

    async with leading(run) as replica:
        monkeypatch.setattr(Log, "append", counts)
        await asyncio.gather(*(replica.record({"kind": "gone", "peer": str(n)}) for n in range(count)))
        return writes, list(replica.records)


@pytest.mark.swarm
def test_records_that_come_together_are_saved_together(
    fresh: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, records = uvloop.run(fsyncs(fresh, monkeypatch, 1000))
    assert [record["peer"] for record in records] == [str(n) for n in range(1000)]
    assert writes <= 8
