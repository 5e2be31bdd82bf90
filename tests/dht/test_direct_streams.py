"""Direct streams between real nodes on loopback, and what comes to a door that is no friend."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from hetpeer.dht.base.errors import PeerLostError
from hetpeer.dht.direct.tls_listener import PROTOCOL, TICKET_BYTES
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.streams.byte_transport import _BATCH, _RECORD
from hetpeer.dht.streams.stream import Stream

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.xdist_group("dht-network"),
    pytest.mark.asyncio(loop_scope="module"),
]
ECHO, ELSE = "test/1/echo", "test/1/else"
LIMIT = 64 << 20
Two = tuple[Node, Node]


async def echo(stream: Stream) -> None:
    while True:
        await stream.receive(timeout_s=30)
        await stream.send({"from": stream.address}, await stream.receive_bytes(LIMIT))


async def started(stack: AsyncExitStack, folder: Path, **config: object) -> Node:
    node = await Node.start(NodeConfig(**{"direct_port": 0} | config), Identity.create(folder))
    stack.push_async_callback(node.close)
    node.may_go_directly(ECHO)
    await node.serve(ECHO, echo)
    await node.serve(ELSE, echo)
    return node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    async with AsyncExitStack() as stack:
        one = await started(stack, folder / "one", alone_ok=True)
        other = await started(stack, folder / "other", peers=(parse_address(one.addresses()[0]),))
        yield one, other


async def asked(stream: Stream, data: bytes) -> bytes:
    await stream.send({}, data)
    await stream.receive(timeout_s=20)
    return bytes(await stream.receive_bytes(LIMIT, timeout_s=20))


async def asked_without_end(stream: Stream) -> None:
    while True:
        await asked(stream, b"x")


async def found(node: Node, peer: str) -> None:
    """Return when `node` sends to `peer` past libp2p.

    A door that did not open in time is tried again after 5 s, then 60 s.
    """
    async with asyncio.timeout(150):
        while peer not in node.direct.leads:
            with suppress(PeerLostError):  # it is cut once there is a direct way
                async with await node.open(peer, ECHO) as stream:
                    await asked(stream, b"over libp2p")
            await asyncio.sleep(0.02)


async def test_streams_leave_libp2p_once_the_door_has_opened(two: Two) -> None:
    one, other = two
    begun = await other.open(one.peer_id, ECHO)
    with pytest.raises(PeerLostError):
        await asked_without_end(begun)  # it is cut, for its owner to open it again
    async with await other.open(one.peer_id, ECHO) as stream:
        data = bytes(range(256)) * (1 << 13)
        assert await asked(stream, data) == data
        assert await asked(stream, b"") == b""
        await stream.send({}, b"y")
        assert (await stream.receive()).header["from"].startswith("/ip4/127.0.0.1/tcp/")
        await stream.skip()
    async with await other.open(one.peer_id, ELSE) as stream:  # not one of those that may
        assert stream._wire.socket.family.name == "AF_UNIX"


@pytest.mark.skipif(sys.platform != "linux", reason="others do not pace")
async def test_a_paced_stream_is_as_fast_as_it_may_be_and_one_over_libp2p_as_it_likes(two: Two) -> None:
    one, other = two
    await found(other, one.peer_id)
    data, clock = bytes(2_000_000), asyncio.get_running_loop().time
    async with await other.open(one.peer_id, ECHO) as stream:
        stream.pace_to(1e6)
        began = clock()
        assert await asked(stream, data) == data
        assert clock() - began > 1.0, "it comes back as fast as it can; a burst is free"
        stream.pace_to(math.inf)
        began = clock()
        for _ in range(20):
            await asked(stream, data)
        assert clock() - began < 20, "forty seconds, were it still paced"
    async with await other.open(one.peer_id, ELSE) as stream:
        stream.pace_to(1.0)
        assert await asked(stream, data) == data


@pytest.mark.parametrize("nbytes", [_BATCH + _RECORD + less for less in (-1, 0, 1)] + [16384, 65536, 999_999])
async def test_nothing_is_left_behind_by_whoever_waits_for_many_bytes_at_once(two: Two, nbytes: int) -> None:
    one, other = two
    await found(other, one.peer_id)
    async with await other.open(one.peer_id, ECHO) as stream:
        for _ in range(5):
            data = os.urandom(nbytes)
            assert await asked(stream, data) == data


@pytest.mark.skipif(sys.platform != "linux", reason="others hear of each packet")
async def test_a_reader_is_woken_for_many_bytes_at_once_until_few_are_left(two: Two) -> None:
    one, other = two
    marks: asyncio.Queue[int] = asyncio.Queue()

    async def marked(stream: Stream) -> None:
        def mark() -> int:
            return stream._wire.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

        await stream.receive(timeout_s=30)
        taking = asyncio.create_task(stream.receive_bytes(LIMIT))
        await asyncio.sleep(0)
        marks.put_nowait(mark())
        await taking
        marks.put_nowait(mark())
        await stream.receive()

    one.may_go_directly("test/1/marked")
    other.may_go_directly("test/1/marked")
    await one.serve("test/1/marked", marked)
    await found(other, one.peer_id)
    async with await other.open(one.peer_id, "test/1/marked") as stream:
        stream.pace_to(1e6)
        await stream.send({}, bytes(500_000))
        assert [await marks.get(), await marks.get()] == [_BATCH, 1]


async def test_what_has_gone_directly_goes_over_libp2p_when_the_door_is_closed(
    two: Two, tmp_path: Path
) -> None:
    _, other = two
    async with AsyncExitStack() as stack:
        third = await started(stack, tmp_path / "third", peers=(parse_address(two[0].addresses()[0]),))
        await other.connect(parse_address(third.addresses()[0]))
        await found(other, third.peer_id)
        await third.direct._tls_listener.close()
        async with await other.open(third.peer_id, ECHO) as stream:
            assert await asked(stream, b"still here") == b"still here"
        assert third.peer_id not in other.direct.leads


async def test_a_node_without_a_door_is_reached_over_libp2p(two: Two, tmp_path: Path) -> None:
    one, _ = two
    async with AsyncExitStack() as stack:
        closed = await started(
            stack, tmp_path / "closed", peers=(parse_address(one.addresses()[0]),), direct_port=None
        )
        async with await one.open(closed.peer_id, ECHO) as stream:
            for _ in range(20):
                assert await asked(stream, b"x") == b"x"
        assert closed.peer_id not in one.direct.leads
        await found(closed, one.peer_id)  # it has no door itself, but others' are open to it


async def test_a_sleep_of_the_machine_breaks_direct_streams_too(two: Two) -> None:
    one, other = two
    await found(other, one.peer_id)
    stream = await other.open(one.peer_id, ECHO)
    other.direct.cut()
    with pytest.raises(PeerLostError):
        await asked(stream, b"x")


# ── who is not to be let in, or not to be trusted ───────────────────────────────────────────────────────────


async def test_somebody_else_who_answers_at_the_door_gets_nothing(two: Two) -> None:
    one, other = two
    await found(other, one.peer_id)
    direct = other.direct
    lead = direct.leads[one.peer_id]
    with pytest.raises(PeerLostError, match="somebody else answers"):
        await direct._dial(replace(lead, certificate=bytes(32)), one.peer_id, ECHO, 5.0)


async def test_nobody_comes_in_without_a_ticket(two: Two) -> None:
    one, other = two
    await found(other, one.peer_id)
    direct = other.direct
    lead = direct.leads[one.peer_id]
    stream = await direct._dial(replace(lead, ticket=bytes(TICKET_BYTES)), one.peer_id, ECHO, 5.0)
    with pytest.raises(PeerLostError):
        await asked(stream, b"x")


async def test_who_shows_a_ticket_that_is_none_any_more_comes_over_libp2p(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told nothing but that the door closes. Later it asks for another ticket."""
    one, other = two
    await found(other, one.peer_id)
    monkeypatch.setattr("hetpeer.dht.direct.direct_streams.RETRY_S", (0.1,))
    door = one.direct._tls_listener
    del door._peers[door._tickets.pop(other.peer_id)]
    streams = [await other.open(one.peer_id, ECHO) for _ in range(2)]
    for stream in streams:
        with pytest.raises(PeerLostError):
            await asked(stream, b"x")
    assert one.peer_id not in other.direct.leads
    assert other.direct._failures[one.peer_id][0] == 1
    async with await other.open(one.peer_id, ELSE) as stream:
        assert await asked(stream, b"x") == b"x"
    await found(other, one.peer_id)


async def asking(node: Node, peer: str) -> Stream:
    """A stream over libp2p on which `peer` is asked for its door."""
    return await (await node.session()).control.open_stream(peer, PROTOCOL, 5.0)


async def test_who_comes_in_or_asks_is_not_the_next_to_be_forgotten(two: Two) -> None:
    one, other = two
    await found(other, one.peer_id)
    tickets = one.direct._tls_listener._tickets
    for protocol in (ECHO, PROTOCOL):
        tickets["somebody else"] = tickets.pop("somebody else", bytes(TICKET_BYTES))
        opening = other.open(one.peer_id, ECHO) if protocol == ECHO else asking(other, one.peer_id)
        async with await opening as stream:
            await stream.send({})
            await stream.receive(timeout_s=20)
        assert [*tickets][-1] == other.peer_id
    del tickets["somebody else"]


async def test_a_door_that_did_not_open_is_tried_again_while_a_stream_goes_over_libp2p(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody opens another one meanwhile."""
    one, _ = two
    monkeypatch.setattr("hetpeer.dht.direct.direct_streams.RETRY_S", (0.1,))
    with socket.create_server(("127.0.0.1", 0)) as server:
        shut = server.getsockname()[1]
    tries: list[int] = []

    async def shut_first(stream: Stream) -> None:
        tries.append(shut)
        if len(tries) > 2:
            await third.direct._tls_listener.handle(stream)
            return
        await stream.receive(timeout_s=5)
        await stream.send({"port": shut, "certificate": bytes(32), "ticket": bytes(TICKET_BYTES)})

    async with AsyncExitStack() as stack:
        third = await started(stack, tmp_path / "third", peers=(parse_address(one.addresses()[0]),))
        await third.serve(PROTOCOL, shut_first)
        async with await one.open(third.peer_id, ECHO), asyncio.timeout(30):
            while third.peer_id not in one.direct.leads:
                await asyncio.sleep(0.01)
        assert len(tries) == 4, "and once through the door"


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(3), bytes(TICKET_BYTES) + b"\xff" + b"\xff" * 255]
)
async def test_whatever_comes_to_the_door_others_are_served(two: Two, said: bytes) -> None:
    one, other = two
    await found(other, one.peer_id)
    lead = other.direct.leads[one.peer_id]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for encrypted in (context, None):
        _, writer = await asyncio.open_connection(lead.host, lead.port, ssl=encrypted)
        writer.write(said)
        writer.close()
    async with await other.open(one.peer_id, ECHO) as stream:
        assert await asked(stream, b"x") == b"x"


@pytest.mark.parametrize("bound", ["MAX_UNKNOWN", "MAX_UNKNOWN_THERE"])
@pytest.mark.parametrize("encrypted", [True, False], ids=["silent", "before the handshake"])
async def test_those_without_a_ticket_are_few_at_a_time(
    two: Two, monkeypatch: pytest.MonkeyPatch, bound: str, encrypted: bool
) -> None:
    """Also those that never begin a handshake: each is a file that is open, five seconds long."""
    one, other = two
    await found(other, one.peer_id)
    door, lead = one.direct._tls_listener, other.direct.leads[one.peer_id]
    async with asyncio.timeout(60):
        while door._unknown:
            await asyncio.sleep(0.01)
    monkeypatch.setattr(f"hetpeer.dht.direct.tls_listener.{bound}", 3)
    context = None
    if encrypted:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    files = psutil.Process().num_fds()
    there = [await asyncio.open_connection(lead.host, lead.port, ssl=context) for _ in range(3)]
    async with asyncio.timeout(60):
        while door._unknown.total() < 3:
            await asyncio.sleep(0.01)
    for _ in range(20):
        with pytest.raises((ConnectionError, ssl.SSLError, asyncio.IncompleteReadError)):
            await refused(lead.host, lead.port, context)
    assert psutil.Process().num_fds() - files <= 2 * 3 + 4, "and not 2 * 23"
    for reader, _ in there:
        with suppress(ConnectionError, ssl.SSLError):
            assert await asyncio.wait_for(reader.read(1), 60) == b""
    async with asyncio.timeout(60):
        while door._unknown:
            await asyncio.sleep(0.01)
    async with await other.open(one.peer_id, ECHO) as stream:
        assert await asked(stream, b"x") == b"x"
    for _, writer in there:
        writer.close()


async def refused(host: str, port: int, context: ssl.SSLContext | None) -> None:
    """Come to a door, and read what is said there."""
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        await reader.readexactly(1)
    finally:
        writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"port": 0},
        {"port": "x"},
        {"port": 1, "certificate": b"x"},
        {"port": 1, "certificate": bytes(32), "ticket": b""},
    ],
)
async def test_an_answer_that_is_none_is_an_offence(
    two: Two, tmp_path: Path, wrong: dict[str, object]
) -> None:
    one, _ = two

    async def lies(stream: Stream) -> None:
        await stream.receive(timeout_s=5)
        await stream.send(wrong)

    async with AsyncExitStack() as stack:
        liar = await started(stack, tmp_path / "liar", peers=(parse_address(one.addresses()[0]),))
        await liar.serve(PROTOCOL, lies)
        async with await one.open(liar.peer_id, ECHO) as stream:
            async with asyncio.timeout(100):
                while liar.peer_id not in one.listener.strikes.counts():
                    assert await asked(stream, b"x") == b"x"
    assert one.listener.strikes.counts()[liar.peer_id] == {"malformed": 1}
