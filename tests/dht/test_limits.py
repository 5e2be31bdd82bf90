"""What a peer may cost us: streams that drip or never end are cut, lines that are slow are not, budgets
hold.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import psutil
import pytest

from hetpeer.dht.base.errors import PeerLostError, ProtocolError, RemoteError
from hetpeer.dht.channels.channel import Channel, Parcel
from hetpeer.dht.channels.channel_server import ChannelServer, dial
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.p2pd.listener import DATA
from hetpeer.dht.streams.abuse import STRANGER, Offence, OffenceError
from hetpeer.dht.streams.byte_transport import ByteTransport
from hetpeer.dht.streams.flow_control import GrantBudget, GrantQueue, HeldBytes, LinkGrants
from hetpeer.dht.streams.frame import PREFIX, encode_head
from hetpeer.dht.streams.stream import Stream
from tests.dht.loopback import Loopback
from tests.dht.peer_process import ECHO, ChildPeer
from tests.dht.test_channel import Kept, until
from tests.dht.test_stream import raw

HEAD = encode_head({"n": 1}, 1 << 20)


DRIP_S = 0.5


async def drip(socket, data: bytes, sent: list[int] | None = None) -> None:
    """A byte each DRIP_S, into `sent` too."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        for byte in data:
            await loop.sock_sendall(socket, bytes([byte]))
            if sent is not None:
                sent.append(byte)
            await asyncio.sleep(DRIP_S)


async def test_streams_that_drip_are_cut_in_time_and_named() -> None:
    """In the prefix, in the head, in the payload.

    In seconds of drops: a busy machine holds up who drips and who looks alike.
    """

    async def take(stream: Stream) -> None:
        await stream.receive(silence_s=8.0)
        await stream.receive_bytes(1 << 20)

    async def suffer(sent: int) -> None:
        async with raw() as (stream, theirs):
            await asyncio.get_running_loop().sock_sendall(theirs, HEAD[:sent])
            drops: list[int] = []
            dripping = asyncio.create_task(drip(theirs, HEAD[sent:] + bytes(100), drops))
            with pytest.raises(OffenceError) as error:
                await take(stream)
            assert error.value.kind is Offence.DRIP
            assert len(drops) * DRIP_S <= 15.0
            dripping.cancel()

    await asyncio.gather(*map(suffer, (0, PREFIX.size, len(HEAD))))


async def test_a_request_that_drips_is_an_offence_one_that_stops_is_none() -> None:
    async def drips() -> None:
        async with raw() as (stream, theirs):
            dripping = asyncio.create_task(drip(theirs, HEAD[:15]))
            with pytest.raises(OffenceError):
                await stream.receive(timeout_s=7.0)  # before a window is over
            dripping.cancel()

    async def stops() -> None:
        async with raw() as (stream, theirs):
            stream.pace = STRANGER
            await asyncio.get_running_loop().sock_sendall(theirs, HEAD + bytes(70_000))
            await stream.receive(timeout_s=5.0)
            with pytest.raises(PeerLostError, match="too little"):
                await stream.receive_bytes(1 << 20)

    await asyncio.gather(drips(), stops())


async def test_a_line_of_a_third_of_a_megabit_is_not_cut() -> None:
    """37 kB/s for all, in pieces of 32 KiB to one lane after the other: each hears nothing for seconds."""
    offences: list[ProtocolError] = []
    async with raw() as (one, first), raw() as (other, second):
        traffic = one._wire.delivery.peer
        other.count(traffic)
        loop = asyncio.get_running_loop()

        async def trickle() -> None:
            payload = encode_head({}, 120_000) + bytes(120_000)
            for begin in range(0, len(payload), 32 << 10):
                for socket in (first, second):
                    piece = payload[begin : begin + (32 << 10)]
                    await loop.sock_sendall(socket, piece)
                    await asyncio.sleep(len(piece) / 37_500)

        async def take(stream: Stream) -> None:
            try:
                await stream.receive(silence_s=8.0)
                await stream.receive_bytes(1 << 20)
            except ProtocolError as error:
                offences.append(error)

        async with asyncio.TaskGroup() as tasks:
            for work in (trickle(), take(one), take(other)):
                tasks.create_task(work)
    assert not offences


async def test_credit_survives_broken_streams_and_holds_back_only_its_own_pool() -> None:
    """One frame of the far pool may be there: it is kept, the next waits, a near one passes, and nothing
    is lost.
    """
    holding, backs = HeldBytes(), []

    class Holds(Kept):
        async def frame(self, channel, header, payload, length) -> None:
            assert channel.grant_lane is not None
            channel.grant_lane.claim(header["pool"], length)
            await super().frame(channel, header, payload, length)
            backs.append((header["pool"], channel.grant_lane.settle(header["pool"], length)))

        def up(self, channel) -> None:
            channel.grant_lane = channel.grant_lane or lane

    theirs = Holds()
    server = ChannelServer(lambda _peer, _key: theirs, 1 << 20)

    def announce() -> None:
        if (channel := server.channels.get(("us", 0))) is not None:
            channel.announce()

    grants = LinkGrants((GrantBudget(100, 100), GrantBudget(100, 100)), 2, holding, announce)
    lane = grants.lane()
    network = Loopback(server.handle)
    queue: GrantQueue[Parcel] = GrantQueue()
    channel = Channel("them", "a", Kept(), 0)
    channel.queue = queue
    dialling = asyncio.create_task(dial(network, "test", channel))  # type: ignore[arg-type]
    for i in range(8):
        queue.add(Parcel({"i": i, "pool": 1}, (bytes(80),), pool=1, cost=80))
    queue.add(Parcel({"i": 100, "pool": 0}, (bytes(80),), pool=0, cost=80))

    def arrived() -> bool:
        while (parcel := queue.next()) is not None:
            channel.send(parcel)
        return len(backs) == seen

    for seen in range(2, 10):
        await until(arrived)
        if seen % 3 == 0:
            network.cut()
        assert holding.held.total() <= 200
        backs[seen - 1][1]()
        if seen == 2:
            backs[0][1]()
            assert {pool for pool, _ in backs} == {0, 1}
    assert sorted(i for i, _ in theirs.frames) == [*range(8), 100]
    channel.close()
    await asyncio.wait_for(dialling, 30)
    server.close()


# ── real nodes ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def open_files() -> Iterator[None]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def round_trips(node: Node, peers: list[str], seconds: float) -> list[list[float]]:
    """Milliseconds of small echoes of each peer, one after the other and in turn, a stream for each.

    In turn, because the machine may be robbed for tenths of a second: what happens to it happens to all
    alike.
    """
    taken: list[list[float]] = [[] for _ in peers]
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(await node.open(peer, ECHO)) for peer in peers]
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for stream, times in zip(streams, taken, strict=True):
                began = time.monotonic()
                await stream.send({"n": 1}, b"x" * 1000)
                await stream.receive(timeout_s=10)
                await stream.skip()
                times.append(1000 * (time.monotonic() - began))
                await asyncio.sleep(0.005)
    return taken


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


@pytest.mark.proof
@pytest.mark.alone
async def test_four_hundred_streams_that_drip(tmp_path: Path, open_files: None) -> None:
    """Of one peer eight are taken, and cut in ten seconds; files stay few.

    An honest peer's answers come as fast as those of a peer that nobody attacks, in the same seconds.
    """
    async with ChildPeer(tmp_path / "child") as child, ChildPeer(tmp_path / "spared") as spared:
        both = [child.report, spared.report]
        peers = tuple(parse_address(report["addresses"][0]) for report in both)
        honest = await Node.start(NodeConfig(peers=peers), Identity.create(tmp_path / "honest"))
        attacker = await Node.start(NodeConfig(peers=peers), Identity.create(tmp_path / "attacker"))
        victim = psutil.Process(child.process.pid)
        try:
            files = victim.num_fds()
            streams: list[Stream] = []
            for _ in range(400):
                with suppress(RemoteError):
                    streams.append(await attacker.open(child.report["peer_id"], ECHO, timeout_s=10))
            assert len(streams) > 300
            assert victim.num_fds() - files <= DATA.per_peer + 4
            dripping = [asyncio.create_task(drip_frames(stream._wire)) for stream in streams]
            attacked, alone = await round_trips(honest, [report["peer_id"] for report in both], 4.0)
            await asyncio.wait_for(asyncio.gather(*dripping), 12.0)
            assert p95(attacked) <= max(2 * p95(alone), 10.0)
            await until(lambda: victim.num_fds() <= files + 1)
        finally:
            await attacker.close()
            await honest.close()


async def drip_frames(wire: ByteTransport) -> None:
    """A byte a second, until the other side has had enough. Raises when it has not after ten."""
    began = time.monotonic()
    with suppress(PeerLostError):
        for byte in HEAD + os.urandom(100):
            await wire.write([bytes([byte])])
            await asyncio.sleep(1.0)
            assert time.monotonic() - began <= 10.0
