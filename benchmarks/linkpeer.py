"""One end of a line, for benchmarks/links.py: sends or takes tensors in several ways, as told on standard
input.

Started in a node of the laboratory as `linkpeer.py FOLDER ADDRESS [PEER HIVEMIND_PEER]`. An order is a line
of JSON: way, lanes, bytes of a tensor, how many of them; the answer says how long they took, from the first
until all were acknowledged.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import ssl
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import uvloop

from hetpeer.dht.channels.channel import Channel, Parcel
from hetpeer.dht.channels.channel_server import ChannelServer, dial
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.streams.byte_transport import ByteTransport
from hetpeer.dht.streams.stream import Stream

PROTOCOL = "bench/1/tensors"
PORT, TCP_PORT, HIVEMIND_PORT, TLS_PORT = 4001, 4002, 4003, 4004
LIMIT = 1 << 30
IN_FLIGHT = 4
"""Tensors that are under way in all, whatever the way."""
CHUNK = 1 << 16
"""hivemind's STREAMING_CHUNK_SIZE_BYTES."""
ACK = b"k"


class Taking:
    """A channel's receiver that takes tensors into memory which is there already."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(16 << 20))

    async def frame(
        self, _channel: Channel, _header: Mapping[str, Any], payload: Stream, length: int
    ) -> None:
        await payload.receive_into(self.memory[:length])

    def beat(self, _channel: Channel) -> None: ...

    def up(self, _channel: Channel) -> None: ...

    def down(self, _channel: Channel) -> None: ...


async def lanes(node: Node, peer: str, count: int, tensor: memoryview, tensors: int) -> None:
    """As peer/transport/link.py does it: each tensor on the lane that has least under way."""
    key = f"{time.monotonic_ns()}"
    opened = [Channel(peer, key, Taking(), LIMIT, lane) for lane in range(count)]
    lines = [asyncio.create_task(dial(node, PROTOCOL, channel)) for channel in opened]
    for _ in range(tensors):
        while sum(len(channel.outbox) for channel in opened) >= max(IN_FLIGHT, 2 * count):  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # a channel tells nobody of one acknowledgement
        min(opened, key=lambda channel: len(channel.outbox)).send(Parcel({}, (tensor,)))
    for channel in opened:
        await channel.drained()
    for channel in opened:
        channel.close()
    await asyncio.gather(*lines)


async def take_tcp(wire: ByteTransport) -> None:
    memory = memoryview(bytearray(16 << 20))
    try:
        while True:
            length = int.from_bytes(await wire.read(8), "little")
            await wire.read_into(memory[:length])
            await wire.write([ACK])
    except Exception:  # noqa: BLE001 - the sender has gone
        wire.close()


class TlsWire(ByteTransport):
    """uvloop's TLS never says that a writer may go on when the limit is zero bytes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1 << 16)  # type: ignore[attr-defined]  # uvloop's own class


def certificate(folder: Path) -> ssl.SSLContext:
    """For the end that listens: TLS 1.3 with a certificate made here and now."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    signed = (
        builder.not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    path = folder / "tls.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(path)
    return context


def trusting() -> ssl.SSLContext:
    """For the end that dials: encrypted, but it does not ask who the other is, which costs nothing a
    gigabyte.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def tcp(host: str, tensor: memoryview, tensors: int, *, tls: bool) -> None:
    """TCP with the same loop, memory and acknowledgements: plain, or under TLS."""
    kind, port, context = (TlsWire, TLS_PORT, trusting()) if tls else (ByteTransport, TCP_PORT, None)
    _, wire = await asyncio.get_running_loop().create_connection(kind, host, port, ssl=context)
    room = asyncio.Semaphore(IN_FLIGHT)

    async def send() -> None:
        for _ in range(tensors):
            await room.acquire()
            await wire.write([len(tensor).to_bytes(8, "little"), tensor])

    sending = asyncio.create_task(send())
    for _ in range(tensors):
        await wire.read(1)
        room.release()
    await sending
    wire.abort()


class Hivemind:
    """hivemind's own calls between two P2P instances: one message for a tensor, or a stream of 64 KiB
    pieces.
    """

    def __init__(self, p2p: Any) -> None:
        self.p2p = p2p
        self.lost_answers = 0
        """Calls that ended without an answer (hivemind 1.1.12 does that now and then) and were made again,
        as its user would.
        """

    @classmethod
    async def start(cls, host: str, peer: str) -> Hivemind:
        from hivemind.p2p import P2P
        from hivemind.proto import runtime_pb2

        p2p = await P2P.create(
            host_maddrs=[f"/ip4/{host}/tcp/{HIVEMIND_PORT}"],
            initial_peers=[peer] if peer else [],
            auto_nat=False,
        )

        async def whole(_request: Any, _context: Any) -> Any:
            return runtime_pb2.ExpertResponse()

        async def pieces(requests: AsyncIterator[Any], _context: Any) -> Any:
            async for _ in requests:
                pass
            return runtime_pb2.ExpertResponse()

        await p2p.add_protobuf_handler("whole", whole, runtime_pb2.ExpertRequest)
        await p2p.add_protobuf_handler("pieces", pieces, runtime_pb2.ExpertRequest, stream_input=True)
        return cls(p2p)

    async def address(self) -> str:
        return str((await self.p2p.get_visible_maddrs())[0])

    async def send(self, way: str, peer: str, tensor: memoryview, tensors: int) -> None:
        from hivemind.p2p import PeerID
        from hivemind.proto import runtime_pb2

        to = PeerID.from_base58(peer.rsplit("/", 1)[1])
        room = asyncio.Semaphore(IN_FLIGHT)

        def request(data: memoryview) -> Any:
            part = runtime_pb2.Tensor(buffer=bytes(data))
            return runtime_pb2.ExpertRequest(tensors=[part])

        async def pieces() -> AsyncIterator[Any]:
            for begin in range(0, len(tensor), CHUNK):
                yield request(tensor[begin : begin + CHUNK])

        async def one() -> None:
            async with room:
                while True:
                    given = request(tensor) if way == "whole" else pieces()
                    try:
                        await self.p2p.call_protobuf_handler(to, way, given, runtime_pb2.ExpertResponse)
                    except ValueError as error:  # of its asingle(): the stream was empty
                        if "empty iterable" not in str(error):
                            raise
                        self.lost_answers += 1
                    else:
                        return

        await asyncio.gather(*(one() for _ in range(tensors)))


async def main(folder: Path, host: str, peer: str, hivemind_peer: str) -> None:
    node = await Node.start(
        NodeConfig(host=host, port=PORT, peers=(parse_address(peer),) if peer else ()),
        Identity.create(folder / "identity.key"),
    )
    other = await Hivemind.start(host, hivemind_peer)
    server = ChannelServer(lambda _peer, _key: Taking(), LIMIT)
    await node.serve(PROTOCOL, server.handle)
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def connected(wire: ByteTransport) -> None:
        tasks.add(loop.create_task(take_tcp(wire)))

    await loop.create_server(lambda: ByteTransport(connected), host, TCP_PORT)
    await loop.create_server(lambda: TlsWire(connected), host, TLS_PORT, ssl=certificate(folder))
    ours = f"/ip4/{host}/tcp/{PORT}/p2p/{node.peer_id}"
    print(json.dumps({"address": ours, "hivemind": await other.address()}), flush=True)
    memory = memoryview(bytearray(16 << 20))
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        tensor, tensors = memory[: order["bytes"]], order["tensors"]
        began = time.monotonic()
        match order["way"]:
            case "tcp" | "tls":
                await tcp(peer.split("/")[2], tensor, tensors, tls=order["way"] == "tls")
            case "lanes":
                await lanes(node, parse_address(peer).peer_id, order["lanes"], tensor, tensors)
            case way:
                await other.send(way, hivemind_peer, tensor, tensors)
        said = {"seconds": time.monotonic() - began, "lost_answers": other.lost_answers}
        print(json.dumps(said), flush=True)
    await node.close()


if __name__ == "__main__":
    there = sys.argv[3:5] if len(sys.argv) > 4 else ("", "")
    uvloop.run(main(Path(sys.argv[1]), sys.argv[2], *there))
