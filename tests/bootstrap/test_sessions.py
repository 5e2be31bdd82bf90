"""Sessions of volunteers that begin again and again, send too much, acknowledge nothing, or stay idle."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgpack
import psutil
import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.service import rate_limit, reading_turns, sessions
from hetpeer.bootstrap.service.rate_limit import ALL_READING, BYTES, MESSAGES, READING, SESSIONS, RateLimit
from hetpeer.bootstrap.service.reading_turns import ReadingTurns
from hetpeer.bootstrap.service.sessions import GIVEN_UP, LOOK_S, VolunteerSessions
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.channels.channel import Channel, Parcel
from hetpeer.dht.channels.channel_server import dial
from hetpeer.dht.streams.frame import encode_head
from tests.dht.loopback import Loopback
from tests.dht.test_channel import Kept, until

HELLO = m.Hello(run="run", incarnation=1)
BOUNDS = m.MessageBounds(blocks=4, microbatches=16, slot=4, checked=False)
LINE = m.TermView(term=1, view=0)


class Desk:
    """A host that admits every peer that says Hello, except strangers."""

    def __init__(self) -> None:
        self.heard: list[m.Message] = []
        self.reception = VolunteerSessions(self, SystemClock(), BOUNDS)

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


def sealed(slot: int = 0) -> m.Sealed:
    """As long as a slot of this run can be."""
    contents = tuple(m.Contents(begin=b, end=b + 1, ids=(0, 1, 2, 3)) for b in range(4))
    return m.Sealed(line=LINE, step=1, slot=slot, contents=contents, losses=dict.fromkeys(range(4), 1.0))


def in_one_mebibyte() -> m.Sealed:
    """Valid in some run, and not in this one."""
    contents = tuple(m.Contents(begin=0, end=1, ids=range(60_000)) for _ in range(5))
    return m.Sealed(line=LINE, step=1, slot=0, contents=contents)


BEFORE_HELLO = {
    "a message": m.encode(sealed()),
    "a farewell": m.encode(m.Farewell()),
    "another protocol": b"GET / HTTP/1.1\r\nHost: hetpeer\r\n\r\n",
    "half a Hello": m.encode(HELLO)[:-9],
    "a long Hello": m.encode(HELLO.model_copy(update={"run": "run" + "x" * 6000})),
    "a message of a MiB": m.encode(in_one_mebibyte()),
    "nothing": b"",
}


@pytest.mark.parametrize("said", BEFORE_HELLO.values(), ids=BEFORE_HELLO)
async def test_nothing_but_a_short_hello_is_read_before_a_session_begins(
    desk: Desk, network: Loopback, said: bytes
) -> None:
    """Also of a peer that has a session already. The stream ends, and nobody hears of it."""
    desk.reception.inside.add("us")
    began = time.thread_time()
    with session(network, "a") as channel:
        channel.send(Parcel({}, (said,)))
        await until(lambda: bool(network.ended))
    assert isinstance(network.ended[0], ProtocolError)
    assert desk.heard == []
    assert time.thread_time() - began < 0.1


OPENED = encode_head({"key": "a", "has": 0, "begun": False}, 0)


def framed(message: bytes) -> bytes:
    return encode_head({"n": 1, "a": 0, "m": {}}, len(message)) + message


FOREIGN = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: hetpeer\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "random bytes": random.Random(0).randbytes(4096),
    "a libp2p message": b"\x13/multistream/1.0.0\n\x07/hello\n",
    "msgpack without frames": msgpack.packb({"kind": "hello", "run": "run"}),
    "a frame of another version": OPENED[:2] + b"\x63" + OPENED[3:],
    "a frame with a long header": OPENED[:4] + b"\xff" * 12 + OPENED,
    "random bytes after the opening": OPENED + random.Random(1).randbytes(4096),
    "msgpack of another program": OPENED + framed(msgpack.packb({"type": 1, "x": 2})),
    "an unknown kind": OPENED + framed(msgpack.packb({"kind": "x"})),
}


@pytest.mark.parametrize("said", FOREIGN.values(), ids=FOREIGN)
async def test_bytes_of_another_protocol_end_the_stream_in_one_line(
    desk: Desk, network: Loopback, said: bytes
) -> None:
    stream = await network.open("them", "test", timeout_s=5.0)
    await stream._wire.write([said])
    await until(lambda: bool(network.ended))
    assert isinstance(network.ended[0], ProtocolError)
    assert "\n" not in network.ended[0].line()
    assert len(network.ended[0].line()) < 600
    with session(network, "b", HELLO) as channel:
        await asyncio.wait_for(channel.drained(), 30)
    assert desk.heard == [HELLO]


@pytest.mark.parametrize("closes", [True, False], ids=["then closing", "then silence"])
async def test_half_a_hello(desk: Desk, network: Loopback, closes: bool) -> None:
    """The stream ends at once, or when the rest is overdue; nothing of the session is left, and no offence
    is counted of a peer whose line may have broken.
    """
    stream = await network.open("them", "test", timeout_s=5.0)
    await stream._wire.write([OPENED + framed(m.encode(HELLO))[:-9]])
    if closes:
        stream.close()
    await until(lambda: bool(network.ended) or not any(channel.is_up for channel in desk.reception))
    await until(lambda: not any(channel.is_up for channel in desk.reception))
    assert not any(isinstance(error, ProtocolError) for error in network.ended)
    desk.looks(2)
    assert not list(desk.reception)
    with session(network, "b", HELLO) as channel:
        await asyncio.wait_for(channel.drained(), 30)
    assert desk.heard == [HELLO]


async def test_a_thousand_sessions_that_say_nothing_after_they_were_opened(
    desk: Desk,
) -> None:
    """Each is closed at the second look; a volunteer that says Hello meanwhile is heard at once."""
    files = psutil.Process().num_fds()
    networks = [Loopback(desk.reception.handle, f"peer {number}") for number in range(1000)]
    for one in networks:
        stream = await one.open("them", "test", timeout_s=5.0)
        await stream.send({"key": "a", "has": 0, "begun": False})
    await until(lambda: len(list(desk.reception)) == len(networks))
    network = Loopback(desk.reception.handle)
    with session(network, "b", HELLO) as channel:
        await asyncio.wait_for(channel.drained(), 30)
        desk.looks(2)
        await until(lambda: sum(one.is_up for one in desk.reception) == 1)
        desk.looks(1)
        assert [one.peer_id for one in desk.reception] == ["us"]
        assert desk.heard == [HELLO]
    await until(lambda: psutil.Process().num_fds() <= files + 4)


async def test_what_follows_a_hello_that_was_refused_is_not_read(desk: Desk, network: Loopback) -> None:
    with session(network, "a", m.Hello(run="another", incarnation=1), sealed(), m.Farewell()) as channel:
        await asyncio.wait_for(channel.drained(), 30)
    assert [message.kind for message in desk.heard] == ["hello"]
    assert network.ended == []


async def test_a_message_is_not_longer_than_the_run_can_need(desk: Desk, network: Loopback) -> None:
    with session(network, "a", HELLO, sealed(), in_one_mebibyte()):
        await until(lambda: bool(network.ended))
    assert desk.heard == [HELLO, sealed()]
    assert "'sealed' with" in str(network.ended[0])


async def test_no_volunteer_sends_what_a_coordinator_says(desk: Desk, network: Loopback) -> None:
    with session(network, "a", HELLO, m.Kept(last="")):
        await until(lambda: bool(network.ended))
    assert desk.heard == [HELLO]
    assert "a kind that no volunteer sends" in str(network.ended[0])


async def test_signs_of_life_are_counted_too(
    desk: Desk, network: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without end they would keep the event loop busy."""
    monkeypatch.setattr(rate_limit, "MESSAGES", (100.0, 10.0))
    stream = await network.open("them", "test", timeout_s=5.0)
    await stream.send({"key": "a", "has": 0, "begun": False})
    for _ in range(60):
        await stream.send({"a": 0})
    began = asyncio.get_running_loop().time()
    await stream.send({"n": 1, "a": 0, "m": {}}, m.encode(HELLO))
    await until(lambda: desk.heard == [HELLO])
    assert asyncio.get_running_loop().time() - began >= 0.4


@pytest.mark.parametrize(
    ("header", "payload"), [({"a": 0}, b"payload"), ({"n": 1, "a": 0, "m": {"x": "x" * 1000}}, b"")]
)
async def test_a_header_that_no_session_has_ends_the_stream(
    desk: Desk, network: Loopback, header: dict[str, Any], payload: bytes
) -> None:
    stream = await network.open("them", "test", timeout_s=5.0)
    await stream.send({"key": "a", "has": 0, "begun": False})
    await stream.send(header, payload)
    await until(lambda: bool(network.ended))
    assert isinstance(network.ended[0], ProtocolError)


async def test_a_stream_that_opens_with_a_payload_is_none(network: Loopback) -> None:
    stream = await network.open("them", "test", timeout_s=5.0)
    await stream.send({"key": "a", "has": 0, "begun": False}, b"payload")
    await until(lambda: bool(network.ended))
    assert isinstance(network.ended[0], ProtocolError)


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


# ── turns to be read ──


class Busy(SystemClock):
    """A clock that says how long reading took, in virtual processor seconds."""

    def __init__(self) -> None:
        self.used = 0.0

    def thread(self) -> float:
        return self.used


async def test_reading_leaves_the_loop_half_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten peers that always have something that takes 10 ms to read, and one that seldom has, of 1 ms."""
    monkeypatch.setattr(reading_turns, "ALL_READING", (0.5, 0.02))
    clock = Busy()
    turns, loop = ReadingTurns(clock), asyncio.get_running_loop()
    waited: list[float] = []

    async def read(limit: RateLimit, seconds: float) -> None:
        await turns.turn(limit)
        with turns.reading(limit):
            clock.used += seconds

    async def always(limit: RateLimit) -> None:
        while True:
            await read(limit, 0.01)

    async def seldom(limit: RateLimit) -> None:
        for _ in range(5):
            await asyncio.sleep(0.1)
            asked = loop.time()
            await read(limit, 0.001)
            waited.append(loop.time() - asked)

    began = loop.time()
    attackers = [asyncio.create_task(always(RateLimit(clock.monotonic()))) for _ in range(10)]
    await seldom(RateLimit(clock.monotonic()))
    took = loop.time() - began
    for attacker in attackers:
        attacker.cancel()
    await asyncio.wait(attackers)
    assert 0.1 * took < clock.used <= 0.5 * took + 0.05
    assert max(waited[1:]) < 0.1, "it has used least, so it is the first of all"


async def test_who_does_not_wait_any_more_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_turns, "ALL_READING", (0.5, 0.0))
    clock = Busy()
    turns, limit = ReadingTurns(clock), RateLimit(clock.monotonic())
    with turns.reading(limit):
        clock.used += 0.05
    first, second = (asyncio.create_task(turns.turn(limit)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 5.0)


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


@pytest.mark.parametrize("seconds", [0.001, 10.0, 60.0])
def test_what_takes_long_to_read_is_read_at_its_share(seconds: float) -> None:
    hearing, now, used = RateLimit(BEGAN), BEGAN, 0.0
    while (now := now + hearing.wait(now, session=False) + 1e-9) <= BEGAN + seconds:
        hearing.took(0.05, now)
        used += 0.05
    assert used == pytest.approx(READING[1] + seconds * READING[0], abs=0.06)
    assert ALL_READING[0] > READING[0]


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


async def test_it_is_seen_when_all_streams_break_at_once(desk: Desk) -> None:
    """Then the fault may be our own line's, and not the volunteers'."""
    assert not desk.reception.all_broken
    desk.reception.inside |= {"a", "b"}
    desk.reception.broken("a")
    assert not desk.reception.all_broken
    desk.reception.broken("b")
    assert desk.reception.all_broken
    desk.reception.resumed("a")
    assert not desk.reception.all_broken
