"""Sessions of volunteers that begin again and again, send too much, acknowledge nothing, or stay idle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.service import sessions
from hetpeer.bootstrap.service.sessions import (
    BYTES,
    GIVEN_UP,
    LOOK_S,
    MESSAGES,
    SESSIONS,
    RateLimit,
    VolunteerSessions,
)
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
    monkeypatch.setattr(sessions, "SESSIONS", (0.01, 3.0))
    for number in range(20):
        with session(network, f"session {number}", HELLO) as channel, suppress(TimeoutError):
            await asyncio.wait_for(channel.drained(), 0.1)
    assert len(desk.heard) == 3


async def test_who_says_too_much_waits_and_nothing_is_lost(
    desk: Desk, network: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MESSAGES", (200.0, 10.0))
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


# ── the rate limit of one peer ──

BEGAN = 100.0


def listened(within_s: float, nbytes: int, *, session: bool) -> int:
    """Messages read within that time from a peer that never pauses."""
    hearing, now, heard = RateLimit(BEGAN), BEGAN, 0
    while True:
        now += hearing.wait(now, session=session) + 1e-9
        if now > BEGAN + within_s:
            return heard
        hearing.heard(nbytes, session=session)
        heard += 1


@pytest.mark.parametrize(
    ("bounds", "nbytes", "session"), [(SESSIONS, 100, True), (MESSAGES, 100, False), (BYTES, 1 << 19, False)]
)
def test_what_never_pauses_is_heard_at_its_rate_after_the_first(
    bounds: tuple[float, float], nbytes: int, session: bool
) -> None:
    rate, at_once = bounds
    unit = nbytes if bounds is BYTES else 1
    for seconds in (0.001, 10.0, 60.0):
        most = (at_once + seconds * rate) / unit
        assert most - 2 <= listened(seconds, nbytes, session=session) <= most + 2


def test_who_says_little_never_waits() -> None:
    """A hundred messages a second of 10 kB, and a session every ten seconds."""
    hearing = RateLimit(BEGAN)
    for tick in range(20_000):
        now, session = BEGAN + tick / 100.0, tick % 1000 == 0
        assert hearing.wait(now, session=session) == 0.0
        hearing.heard(10_000, session=session)


def test_what_is_rested_is_as_new() -> None:
    hearing = RateLimit(BEGAN)
    assert hearing.is_rested(BEGAN)
    hearing.heard(100, session=True)
    assert not hearing.is_rested(BEGAN + 1.0)
    assert hearing.is_rested(BEGAN + 1.0 / SESSIONS[0])
