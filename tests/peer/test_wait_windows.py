"""The coordinator's real event loop forms groups when their wait windows end, not at its next tick."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.consensus.replica import Replica, run_logs
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import AveragingSettings
from hetpeer.bootstrap.service.core_interface import LeaderStart
from hetpeer.bootstrap.service.driver import TICK_S, CoordinatorService
from hetpeer.bootstrap.storage.replication import CheckpointReplication
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.training.control_session import ControlSession
from tests.bootstrap.engine import make_run
from tests.dht.loopback import Loopback
from tests.peer.test_control_session import Network
from tests.swarm.swarm import resign

WINDOW_S = 0.02
LATE_S = 0.03
"""Most seconds from the second ready signal to the group."""


class Holder:
    """A volunteer that holds all of cluster `number`, whose `trained` batches the log has."""

    def __init__(self, run: RunDirectory, folder: Path, number: int, trained: int) -> None:
        self.identity = Identity.create(folder / f"holder {number}")
        self.begun_at: float | None = None
        """When it was told to average with others."""
        self.ready_at = 0.0
        """When it said that it is ready, which lets its cluster line up."""
        self.welcome = asyncio.Event()
        self._run, self._number, self._trained = run, number, trained

    def session(self, service: Network) -> ControlSession:
        """Its control session with the service, once that is there."""
        node: Any = Loopback(service.handle, self.identity.peer_id)
        membership = MembershipConfig(self._run.signed, self._run.path)
        self._control = ControlSession(node, membership, self._hello, self._hears, self._nothing, self._ask)
        return self._control

    def _hello(self) -> None:
        place = 0, len(self._run.manifest.blocks)
        hello = m.Hello(
            run=self._run.run_id, incarnation=1, cluster=self._number, place=place, held=self._held
        )
        self._control.tell(hello)

    @property
    def _held(self) -> tuple[m.Held, ...]:
        blocks = self._run.manifest.blocks
        return tuple(m.Held(block=b.index, version=self._trained, digest=b.state_digest) for b in blocks)

    def _hears(self, message: m.Message) -> None:
        if isinstance(message, m.Welcome):
            assert message.member
            self._line = message.line
            self.welcome.set()
        elif isinstance(message, m.Begin) and message.group:
            self.begun_at = time.monotonic()

    def ready(self) -> None:
        """Say that it holds its version: its cluster is whole."""
        self.ready_at = time.monotonic()
        self._control.tell(m.Ready(line=self._line, version=self._trained, held=self._held))

    def _nothing(self, _last: str) -> Iterator[list[str]]:
        yield from ()

    async def _ask(self) -> None:
        """There is nobody else."""


def grouped_log(run: RunDirectory, trained: list[int]) -> list[dict[str, Any]]:
    """Clusters that were founded, of which some have trained a batch that they have not averaged yet."""
    commit = {"kind": "commit", "term": 1, "view": 0, "step": 0, "plan": 1, "loss": 1.0, "seconds": 1.0}
    sums = {str(block.index): "0" * 64 for block in run.manifest.blocks}
    return [
        {"kind": "reign", "term": 1},
        *({"kind": "founded", "cluster": number, "version": 0} for number in range(len(trained))),
        *(
            commit | {"cluster": number, "batch": number, "gradients": sums}
            for number, batches in enumerate(trained)
            if batches
        ),
    ]


async def seconds_to_a_group(run: RunDirectory, folder: Path) -> float:
    """Seconds from the second ready signal, half a window after the first, to the group."""
    trained = [1, 1, 0]  # the third one must train first: it is not ready, and not waited for
    holders = [Holder(run, folder, number, batches) for number, batches in enumerate(trained)]
    network: Any = Network("")
    network.peer_id, network.listener = run.manifest.coordinators[0], SimpleNamespace(members=frozenset())
    membership = MembershipConfig(run.signed, run.path)
    with run_logs(run) as logs:
        replica = Replica(network, run, membership, logs, SystemClock())
        running = asyncio.create_task(replica.run())
        await replica.leading()
        if not replica.records:
            await replica.record(*grouped_log(run, trained))
        checkpoints = CheckpointReplication(network, run, replica.records, replica.company)
        begun = LeaderStart.of(run, replica.records, time.monotonic())
        service = CoordinatorService(network, run, replica, checkpoints, SystemClock(), begun)
        tasks = [asyncio.create_task(service.run(asyncio.Event()))]
        try:
            async with asyncio.timeout(60):
                await service.serving.wait()
                tasks += [asyncio.create_task(one.session(network).run(lambda: 1)) for one in holders]
                for one in holders:
                    await one.welcome.wait()
                first, second, third = holders
                third.ready()
                await asyncio.sleep(TICK_S)  # all three are known before two are ready
                first.ready()
                await asyncio.sleep(WINDOW_S / 2)
                second.ready()
                while first.begun_at is None or second.begun_at is None:
                    assert not tasks[0].done(), tasks[0].exception()
                    await asyncio.sleep(0.001)
        finally:
            for task in (*tasks, running):
                task.cancel()
            await asyncio.wait([*tasks, running])
    assert third.begun_at is None
    known = {one.identity.peer_id for one in holders}
    assert network.listener.members == known, "nobody is a stranger while other clusters begin something"
    assert first.begun_at >= first.ready_at + WINDOW_S, "the window is not shorter, either"
    return max(first.begun_at, second.begun_at) - second.ready_at


@pytest.mark.alone
async def test_a_group_forms_within_30_ms_of_the_second_ready_signal(tmp_path: Path) -> None:
    """With a window of 20 ms, in the middle of five runs."""
    made = make_run(tmp_path)
    layout = ((0, len(made.manifest.blocks)),)
    averaging = AveragingSettings(window_s=WINDOW_S)
    took = []
    for turn in range(5):
        folder = tmp_path / str(turn)
        run = resign(made, averaging=averaging, layouts=(layout,))
        took.append(await seconds_to_a_group(run, folder))
        run.log_path.unlink()
    assert statistics.median(took) < LATE_S, took
