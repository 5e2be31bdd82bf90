"""A reliable peer's two logs: what was decided, and what was told of it to everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import uvloop

from hetpeer.bootstrap.council import Council
from hetpeer.bootstrap.log import Log, read_log
from hetpeer.bootstrap.replica import Replica, run_logs
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.dht.clock import SystemClock
from hetpeer.dht.errors import ExitCode, LocalError
from hetpeer.dht.identity import Identity
from hetpeer.dht.node import Node, NodeConfig

DECIDED = {"kind": "halt", "why": "the first"}


async def lead(run: RunDirectory, record: Mapping[str, Any] | None = None) -> None:
    """Be the only reliable peer of `run` until it leads and `record` is decided."""
    node = await Node.start(NodeConfig(), Identity.load(run.identity_path))
    try:
        with run_logs(run) as logs:
            replica = Replica(node, run, Council(run.signed, run.path), logs, SystemClock())
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(replica.run())
                await replica.leading()
                if record is not None:
                    await replica.record(record)
                running.cancel()
    finally:
        await node.close()


@pytest.mark.swarm
def test_a_ledger_that_tells_another_story_than_the_journal_stops_the_run(fresh: RunDirectory) -> None:
    """As where somebody puts one of the two files back from another day."""
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
