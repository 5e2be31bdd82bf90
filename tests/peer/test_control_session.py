"""A volunteer's evidence reaches the coordinator's disk, whenever sessions and reigns end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import CONTROL_PROTOCOL
from hetpeer.bootstrap.consensus.replica import Replica, run_logs
from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.bootstrap.log.record_log import Log, read_log
from hetpeer.bootstrap.log.volunteer_log import keep_event, read_event, read_events, sign_event
from hetpeer.bootstrap.log.volunteer_log_files import AT_FIRST, LINE_BYTES, SLOT_BYTES
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.service.core_interface import LeaderStart
from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.bootstrap.service.rate_limit import SESSIONS
from hetpeer.bootstrap.storage.replication import CheckpointReplication
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.channels import channel
from hetpeer.dht.channels.channel import Parcel
from hetpeer.dht.channels.channel_server import dial
from hetpeer.dht.channels.redial import RENEWAL_S
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.p2pd.listener import StreamBudget
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.training.control_session import ControlSession
from tests.bootstrap.engine import make_run
from tests.bootstrap.test_volunteer_log_files import applied, committed
from tests.dht.loopback import Loopback


class Network(Loopback):
    """The part of a Node that a coordinator and its volunteer use."""

    is_up = True

    def __init__(self, volunteer: str) -> None:
        super().__init__(self._nobody, volunteer)
        self.peer_id = ""
        """Of the coordinator."""

    async def _nobody(self, stream: Stream) -> None:
        stream.abort()

    async def serve(
        self, protocol: str, handler: Callable[[Stream], Awaitable[None]], _budget: StreamBudget
    ) -> None:
        if protocol == CONTROL_PROTOCOL:
            self.handle = handler

    def call_others(self) -> None:
        """There are none."""

    def gone(self) -> None:
        self.handle = self._nobody
        self.cut()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path)


@pytest.fixture
def volunteer(tmp_path: Path) -> Identity:
    return Identity.create(tmp_path / "identity")


@pytest.fixture
def network(volunteer: Identity) -> Network:
    return Network(volunteer.peer_id)


async def _nothing() -> None: ...


class Rig:
    """A control session with one reign after another."""

    def __init__(self, run: RunDirectory, volunteer: Identity, network: Network) -> None:
        self.path = run.volunteers / f"{volunteer.peer_id}.jsonl"
        self.lines: list[str] = []
        self.session = ControlSession(
            network,
            MembershipConfig(run.signed, run.path),
            self._hello,
            lambda _: None,
            self._after,
            _nothing,
        )
        network.peer_id = run.manifest.coordinators[0]
        self._run, self._volunteer, self._network = run, volunteer, network

    def _after(self, last: str) -> Iterator[list[str]]:
        """One at a time."""
        number = self.lines.index(last) + 1 if last else 0
        while number < len(self.lines):
            yield [self.lines[number]]
            number += 1

    def _hello(self) -> None:
        self.session.tell(m.Hello(run=self._run.run_id, incarnation=1))

    def happens(self, number: int) -> None:
        """The volunteer writes a line, and gives it to the session."""
        self.lines.append(
            sign_event(applied(self._run, self._volunteer, incarnation=number), self._volunteer)
        )
        self.session.give_evidence(self.lines[-1])

    async def reign(self) -> None:
        """One reign of the only reliable peer."""
        network: Any = self._network
        with run_logs(self._run) as logs:
            membership = MembershipConfig(self._run.signed, self._run.path)
            replica = Replica(network, self._run, membership, logs, SystemClock())
            running = asyncio.create_task(replica.run())
            try:
                await replica.leading()
                if not replica.records:
                    await replica.record(committed(self._run, 0, self._volunteer))
                checkpoints = CheckpointReplication(network, self._run, replica.records, replica.company)
                clock = SystemClock()
                begun = LeaderStart.of(self._run, replica.records, clock.monotonic())
                service = CoordinatorService(network, self._run, replica, checkpoints, clock, begun)
                await service.run(asyncio.Event())
            finally:
                running.cancel()
                await asyncio.wait([running])

    async def arrived(self, *numbers: int) -> None:
        async with asyncio.timeout(100):
            while not self.path.is_file() or self._kept() != set(numbers):
                await asyncio.sleep(0.01)

    def _kept(self) -> set[int]:
        return {read_event(line)[1]["incarnation"] for _, line in read_events(self.path)}


async def test_line_for_which_there_was_no_room_goes_to_the_next_reign(
    run: RunDirectory, volunteer: Identity, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "ACK_S", 0.0)  # the frame that brought it is not acknowledged, however soon
    rig = Rig(run, volunteer, network)
    rig.path.mkdir(parents=True)  # in the way of the file
    speaking = asyncio.create_task(rig.session.run(lambda: 1))
    rig.happens(1)
    with pytest.raises(ExceptionGroup) as caught:
        await rig.reign()
    assert caught.group_contains(LocalError)
    network.gone()

    rig.path.rmdir()
    again = asyncio.create_task(rig.reign())
    await rig.arrived(1)
    for task in (again, speaking):
        task.cancel()
    await asyncio.wait([again, speaking])


async def test_a_core_that_breaks_over_a_message_ends_the_reign(
    run: RunDirectory, volunteer: Identity, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have noted what it never says: the next one begins with what is written."""
    rig = Rig(run, volunteer, network)
    monkeypatch.setattr(Coordinator, "receive", lambda *_: {}["nobody"])
    speaking = asyncio.create_task(rig.session.run(lambda: 1))
    async with asyncio.timeout(60):
        with pytest.raises(ExceptionGroup) as caught:
            await rig.reign()
    assert caught.group_contains(KeyError)
    speaking.cancel()
    await asyncio.wait([speaking])


async def test_line_given_between_two_sessions_goes_to_the_next(
    run: RunDirectory, volunteer: Identity, network: Network
) -> None:
    rig = Rig(run, volunteer, network)
    reign = asyncio.create_task(rig.reign())
    speaking = asyncio.create_task(rig.session.run(lambda: 1))
    rig.happens(1)
    await rig.arrived(1)
    rig.session.renew()
    while rig.session.is_up:
        await asyncio.sleep(0)
    await asyncio.sleep(RENEWAL_S / 4)
    rig.happens(2)
    await rig.arrived(1, 2)
    for task in (reign, speaking):
        task.cancel()
    await asyncio.wait([reign, speaking])


async def test_another_coordinator_gets_what_it_lacks_and_nothing_twice(
    run: RunDirectory, volunteer: Identity, network: Network
) -> None:
    rig = Rig(run, volunteer, network)
    speaking = asyncio.create_task(rig.session.run(lambda: 1))
    for lines in ([], [1], []):  # what each of the three has from earlier reigns
        rig.path.unlink(missing_ok=True)
        for number in lines:
            keep_event(rig.path, rig.lines[number - 1])
        reign = asyncio.create_task(rig.reign())
        rig.happens(len(rig.lines) + 1)
        await rig.arrived(*range(1, len(rig.lines) + 1))
        reign.cancel()
        await asyncio.wait([reign])
        network.gone()
        assert len(list(read_events(rig.path))) == len(rig.lines)
    speaking.cancel()
    await asyncio.wait([speaking])


async def test_who_says_more_than_there_can_be_is_heard_no_further_and_the_run_goes_on(
    run: RunDirectory, volunteer: Identity, network: Network
) -> None:
    rig = Rig(run, volunteer, network)
    reign = asyncio.create_task(rig.reign())
    speaking = asyncio.create_task(rig.session.run(lambda: 1))
    rig.happens(1)
    await rig.arrived(1)
    for number in range(2, 30):
        line = sign_event(applied(run, volunteer, incarnation=number, x="x" * 50_000), volunteer)
        rig.session.tell(m.EventLine(line=line))
    async with asyncio.timeout(100):
        while "more evidence than there can be" not in "".join(map(str, network.ended)):
            await asyncio.sleep(0.01)
    of_a_block = LINE_BYTES + run.manifest.training.microbatches * SLOT_BYTES
    assert rig.path.stat().st_size <= AT_FIRST + 2 * len(run.manifest.blocks) * of_a_block
    assert not reign.done()
    for task in (reign, speaking):
        task.cancel()
    await asyncio.wait([reign, speaking])


async def test_a_session_after_the_other_is_no_record_after_the_other(
    run: RunDirectory, volunteer: Identity, network: Network
) -> None:
    """It never has a place, so nothing of it is kept."""
    rig = Rig(run, volunteer, network)
    reign = asyncio.create_task(rig.reign())
    hello = Parcel({}, (m.encode(m.Hello(run=run.run_id, incarnation=1)),))
    for number in range(10 * int(SESSIONS[1])):
        one = channel.Channel(network.peer_id, f"1.{number}", rig.session, m.MAX_MESSAGE_BYTES)
        one.send(hello)
        dialling = asyncio.create_task(dial(network, CONTROL_PROTOCOL, one))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(one.drained(), 0.1)
        one.close()
        dialling.cancel()
    gone = [record for record in read_log(run.log_path) if record["kind"] == "gone"]
    assert gone == []
    assert not reign.done()
    reign.cancel()
    await asyncio.wait([reign])


class Hears:
    """A volunteer that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[m.Message] = []

    async def frame(self, _channel: Any, _header: Any, payload: Any, _length: int) -> None:
        self.told.append(m.decode(await payload.receive_bytes(m.MAX_MESSAGE_BYTES)))

    async def beat(self, _channel: Any) -> None: ...

    def up(self, _channel: Any) -> None: ...

    def down(self, _channel: Any) -> None: ...


async def test_nobody_waits_for_the_record_of_a_volunteer_that_is_gone(
    run: RunDirectory, volunteer: Identity, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stands still while it is written; others are answered."""
    rig, written, append = Rig(run, volunteer, network), threading.Event(), Log.append

    def slow(log: Log, *records: dict[str, Any]) -> None:
        if "'gone'" in str(records):
            written.wait(60.0)
        append(log, *records)

    monkeypatch.setattr(Log, "append", slow)
    reign = asyncio.create_task(rig.reign())
    hello, hears = m.Hello(run=run.run_id, incarnation=1), Hears()
    dialling = []

    def session(key: str) -> channel.Channel:
        one = channel.Channel(network.peer_id, key, hears, m.MAX_MESSAGE_BYTES)
        one.send(Parcel({}, (m.encode(hello),)))
        dialling.append(asyncio.create_task(dial(network, CONTROL_PROTOCOL, one)))
        return one

    async def welcomed(times: int) -> m.Welcome:
        async with asyncio.timeout(20):
            while len(found := [x for x in hears.told if isinstance(x, m.Welcome)]) < times:
                await asyncio.sleep(0.01)
        return found[-1]

    try:
        first = session("1.1")
        place = next(place for place in (await welcomed(1)).places if place.open)
        claim = m.Claim(cluster=place.cluster, begin=place.begin, end=place.end)
        first.send(Parcel({}, (m.encode(claim),)))
        await asyncio.wait_for(first.drained(), 20)
        session("1.2")
        await welcomed(2)
        kinds = [record["kind"] for record in read_log(run.log_path)]
        assert "gone" not in kinds
    finally:
        written.set()
        for task in (reign, *dialling):
            task.cancel()
        await asyncio.wait([reign, *dialling])
