"""Sessions of volunteers that begin again and again, send too much, acknowledge nothing, or stay idle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.service import rate_limit, sessions
from hetpeer.bootstrap.service.sessions import GIVEN_UP, LOOK_S, VolunteerSessions
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.channels.channel import Channel, Parcel
from hetpeer.dht.channels.channel_server import dial
from tests.dht.loopback import Loopback
from tests.dht.test_channel import Kept, until

HELLO = m.Hello(run="run", incarnation=1)


class Desk:
    """A host that admits every peer that says Hello, except strangers."""

    def __init__(self) -> None:
        self.heard: list[m.Message] = []
        self.reception = VolunteerSessions(self, SystemClock())

    def received(self, peer: str, message: m.Message) -> None:
        if isinstance(message, m.Hello) and message.run == "run":
            self.reception.inside.add(peer)
        if not isinstance(message, m.Heartbeat):
            self.heard.append(message)

    def broken(self, peer: str) -> None: ...

    def resumed(self, peer: str) -> None: ...

    def looks(self, times: int) -> None:
        """Make this many checks, without the time between them."""
        for _ in range(times):
            self.reception.look(self.reception._looked + LOOK_S)


class Quiet(Kept):
    """A volunteer that acknowledges what it is told."""

    async def frame(self, _channel: Channel, _header: Any, payload: Any, _length: int) -> None:
        await payload.receive_bytes(m.MAX_MESSAGE_BYTES)


@contextmanager
def session(network: Loopback, key: str, *said: m.Message) -> Iterator[Channel]:
    channel = Channel("them", key, Quiet(), m.MAX_MESSAGE_BYTES)
    for message in said:
        channel.send(Parcel({}, (m.encode(message),)))
    dialling = asyncio.create_task(dial(network, "test", channel))  # type: ignore[arg-type]
    try:
        yield channel
    finally:
        channel.close()
        dialling.cancel()


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def network(desk: Desk) -> Loopback:
    return Loopback(desk.reception.handle)


async def test_a_session_begins_once(desk: Desk, network: Loopback) -> None:
    with session(network, "a", HELLO, HELLO):
        await until(lambda: bool(network.ended))
    assert "begins twice" in str(network.ended[0])
    assert desk.heard == [HELLO]


async def test_sessions_without_end_are_heard_one_after_the_other(
    desk: Desk, network: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent in the older ones. A new session costs a record in the log each time."""
    monkeypatch.setattr(rate_limit, "SESSIONS", (0.01, 3.0))
    for number in range(20):
        with session(network, f"session {number}", HELLO) as channel, suppress(TimeoutError):
            await asyncio.wait_for(channel.drained(), 0.1)
    assert len(desk.heard) == 3


async def test_who_says_too_much_waits_and_nothing_is_lost(
    desk: Desk, network: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limit, "MESSAGES", (200.0, 10.0))
    told = [m.Paced(computing=float(number), links={}) for number in range(50)]
    began = asyncio.get_running_loop().time()
    with session(network, "a", HELLO, *told):
        await until(lambda: len(desk.heard) == 51)
    assert asyncio.get_running_loop().time() - began >= 40 / 200.0
    assert desk.heard == [HELLO, *told]


async def test_who_acknowledges_nothing_has_no_session_any_more(
    desk: Desk, network: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_UNHEARD", 1 << 20)
    stream = await network.open("them", "test", timeout_s=5.0)
    await stream.send({"key": "a", "has": 0, "begun": False})
    await until(lambda: desk.reception.channel("us") is not None)
    channel = desk.reception.channel("us")
    assert channel is not None
    for _ in range(100):
        desk.reception.tell(channel, m.Kept(last="x" * 100_000))
    assert channel.closed
    assert channel.outbox.nbytes == 0


async def test_who_acknowledges_hears_any_amount(
    desk: Desk, network: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_UNHEARD", 1 << 20)
    with session(network, "a", HELLO):
        await until(lambda: desk.heard == [HELLO])
        channel = desk.reception.channel("us")
        assert channel is not None
        for _ in range(100):
            desk.reception.tell(channel, m.Kept(last="x" * 100_000))
            await asyncio.wait_for(channel.drained(), 30)
        assert not channel.closed


@pytest.mark.parametrize("said", [(), (m.Hello(run="another", incarnation=1),)], ids=["nothing", "wrong"])
async def test_who_was_not_let_in_is_asked_what_it_wants_and_forgotten(
    desk: Desk, network: Loopback, said: tuple[m.Message, ...]
) -> None:
    with session(network, "stranger", *said):
        await until(lambda: (c := desk.reception.channel("us")) is not None and c.is_up)
        desk.looks(1)
        channel = desk.reception.channel("us")
        assert channel is not None, "it has just come"
        assert not channel.closed
        desk.looks(1)
        assert channel.closed
    await until(lambda: not channel.is_up)
    desk.looks(1)
    assert list(desk.reception) == []


async def test_who_was_let_in_is_remembered_until_its_stream_was_broken_for_long(
    desk: Desk, network: Loopback
) -> None:
    with session(network, "a", HELLO) as channel:
        await until(lambda: desk.heard == [HELLO])
        desk.looks(2 * GIVEN_UP)
        served = desk.reception.channel("us")
        assert served is not None
        assert served.is_up
        channel.close()
    await until(lambda: not served.is_up)
    desk.looks(GIVEN_UP - 1)
    assert desk.reception.channel("us") is served
    desk.looks(2)
    assert list(desk.reception) == []
    assert not desk.reception.inside


async def test_a_volunteer_has_one_session(desk: Desk, network: Loopback) -> None:
    stream = await network.open("them", "test", timeout_s=5.0)
    await stream.send({"key": "a", "lane": 1, "has": 0, "begun": False})
    await until(lambda: bool(network.ended))
    assert "lane 1" in str(network.ended[0])
