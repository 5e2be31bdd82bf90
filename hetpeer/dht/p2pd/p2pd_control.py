"""Client of p2pd's control protocol: our id, connecting to peers, opening streams, receiving theirs.

Every request takes a fresh connection to p2pd's unix socket and is a protobuf (`hivemind.proto.p2pd_pb2`)
behind a varint length; after STREAM_OPEN the same connection carries the stream. hivemind's `P2P` is not used
for this, because it wraps streams in StreamReader, which copies each payload twice more.
"""

from __future__ import annotations

import asyncio
import math
from functools import lru_cache
from typing import Any

import base58

from hetpeer.dht.base.errors import PeerLostError, RemoteError
from hetpeer.dht.base.untrusted import varint
from hetpeer.dht.identity.addresses import Address, address_from_bytes, hivemind_unix_address, text_of
from hetpeer.dht.streams.byte_transport import ByteTransport
from hetpeer.dht.streams.stream import Stream

MAX_MESSAGE = 4 * 1024 * 1024
"""Bytes of one control message: the limit that p2pd itself keeps."""
_OWN_DEADLINE_S = 5.0
"""Deadline of requests that p2pd answers without the network; a healthy one needs about 1 ms."""
LATELY_S = 0.25
"""Age in seconds up to which `connected_lately` believes an answer: one operation of the DHT asks for a dozen
peers within that time.
"""


class P2pdError(RemoteError):
    """p2pd refused a request, or is not there. `why` is its own text."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "HP-NET-011",
            "the network process refused a request",
            why=why,
            fix="try again: it is started again whenever it dies",
        )


class P2pdControl:
    """Requests to the p2pd that listens on the unix socket `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._connected: frozenset[str] = frozenset()
        self._connected_at = -math.inf

    async def own_addresses(self) -> list[Address]:
        """Addresses at which p2pd believes that others can reach us. Raises `P2pdError`."""
        answer = await self._ask(_pb().Request(type=_pb().Request.IDENTIFY), _OWN_DEADLINE_S)
        peer_id = base58.b58encode(answer.identify.id).decode()
        addresses = (address_from_bytes(raw, peer_id) for raw in answer.identify.addrs)
        return [address for address in addresses if address is not None]

    async def connections(self) -> list[tuple[str, str]]:
        """(peer id, address of the remote end) of each open connection. Raises `P2pdError`."""
        answer = await self._ask(_pb().Request(type=_pb().Request.LIST_PEERS), _OWN_DEADLINE_S)
        found = [(_peer_id(peer.id), text_of(b"".join(peer.addrs))) for peer in answer.peers]
        self._connected = frozenset(peer for peer, _ in found)
        self._connected_at = asyncio.get_running_loop().time()
        return found

    async def connected_lately(self, peer_id: str) -> bool:
        """Whether a peer is connected, or was within the last LATELY_S. Raises `P2pdError`."""
        fresh = asyncio.get_running_loop().time() - self._connected_at < LATELY_S
        if not (fresh and peer_id in self._connected):
            await self.connections()
        return peer_id in self._connected

    async def addresses_of(self, peer_id: str) -> list[Address]:
        """Addresses at which p2pd knows a peer to listen; instant for a connected one. Raises `P2pdError`."""
        pb = _pb()
        find = pb.DHTRequest(type=pb.DHTRequest.FIND_PEER, peer=base58.b58decode(peer_id))
        answer = await self._ask(pb.Request(type=pb.Request.DHT, dht=find), _OWN_DEADLINE_S)
        addresses = (address_from_bytes(raw, peer_id) for raw in answer.dht.peer.addrs)
        return [address for address in addresses if address is not None]

    async def connect(self, address: Address, timeout_s: float) -> None:
        """Connect to a peer at a known address. Raises `P2pdError` with libp2p's reason."""
        pb = _pb()
        connect = pb.ConnectRequest(peer=base58.b58decode(address.peer_id), addrs=[address.transport_bytes()])
        await self._ask(pb.Request(type=pb.Request.CONNECT, connect=connect), timeout_s)

    async def disconnect(self, peer_id: str) -> None:
        """Close all connections to a peer. Raises `P2pdError`."""
        pb = _pb()
        disconnect = pb.DisconnectRequest(peer=base58.b58decode(peer_id))
        await self._ask(pb.Request(type=pb.Request.DISCONNECT, disconnect=disconnect), _OWN_DEADLINE_S)

    async def send_streams_to(self, protocol: str, listen_path: str) -> None:
        """Have p2pd connect each incoming stream of `protocol` to our unix socket. Raises `P2pdError`."""
        pb, target = _pb(), hivemind_unix_address(listen_path).to_bytes()
        handler = pb.StreamHandlerRequest(addr=target, proto=[protocol], balanced=False)
        await self._ask(pb.Request(type=pb.Request.STREAM_HANDLER, streamHandler=handler), _OWN_DEADLINE_S)

    async def open_stream(self, peer_id: str, protocol: str, timeout_s: float) -> Stream:
        """A new stream to `peer_id`. Raises `PeerLostError`."""
        return Stream(await self.open_wire(peer_id, protocol, timeout_s), peer_id=peer_id, protocol=protocol)

    async def open_wire(self, peer_id: str, protocol: str, timeout_s: float) -> ByteTransport:
        """The bytes of a new stream, for a protocol without our frames. Raises `PeerLostError`."""
        pb, seconds = _pb(), max(1, round(timeout_s))
        opening = pb.StreamOpenRequest(peer=base58.b58decode(peer_id), proto=[protocol], timeout=seconds)
        wire: ByteTransport | None = None
        try:
            async with asyncio.timeout(timeout_s):
                wire = await self._connection()
                await _exchange(wire, pb.Request(type=pb.Request.STREAM_OPEN, streamOpen=opening))
        except (P2pdError, PeerLostError) as error:
            raise PeerLostError(peer_id, error.why) from error
        except TimeoutError:
            raise PeerLostError(peer_id, f"no stream to it could be opened within {timeout_s} s") from None
        else:
            opened, wire = wire, None  # now the caller's
            return opened
        finally:
            if wire is not None:
                wire.abort()

    async def _connection(self) -> ByteTransport:
        try:
            _, wire = await asyncio.get_running_loop().create_unix_connection(ByteTransport, self.path)
        except OSError as error:
            raise P2pdError(f"it does not answer: {error.strerror or error}") from error
        return wire

    async def _ask(self, request: Any, timeout_s: float) -> Any:
        wire: ByteTransport | None = None
        try:
            async with asyncio.timeout(timeout_s):
                wire = await self._connection()
                return await _exchange(wire, request)
        except PeerLostError as error:
            raise P2pdError(error.why) from error
        except TimeoutError:
            raise P2pdError(f"no answer within {timeout_s} s") from None
        finally:
            if wire is not None:
                wire.abort()


@lru_cache(1024)
def _peer_id(raw: bytes) -> str:
    """The text of a peer id: base58 is slow, and the same few peers come again and again."""
    return base58.b58encode(raw).decode()


def _pb() -> Any:
    """p2pd's protobuf messages, imported on first use: the command line does without them."""
    from hivemind.proto import p2pd_pb2

    return p2pd_pb2


async def _exchange(wire: ByteTransport, request: Any) -> Any:
    """Send `request` and return the answer. Raises `P2pdError` on ERROR."""
    message = request.SerializeToString()
    await wire.write([varint(len(message)), message])
    answer = _pb().Response()
    answer.ParseFromString(await read_message(wire))
    if answer.type == _pb().Response.ERROR:
        raise P2pdError(answer.error.msg)
    return answer


async def read_stream_info(wire: ByteTransport) -> tuple[str, str, str]:
    """(authenticated peer id, remote address, protocol), with which p2pd opens each stream for us."""
    info = _pb().StreamInfo()
    info.ParseFromString(await read_message(wire))
    return base58.b58encode(info.peer).decode(), text_of(bytes(info.addr)), str(info.proto)


def stream_info(peer_id: str, protocol: str) -> bytes:
    """The bytes that `read_stream_info` reads, without an address."""
    info = _pb().StreamInfo(peer=base58.b58decode(peer_id), addr=b"", proto=protocol)
    message: bytes = info.SerializeToString()
    return varint(len(message)) + message


async def read_message(wire: ByteTransport) -> bytes:
    """One protobuf behind its length. Raises `P2pdError`, `PeerLostError`."""
    length, shift = 0, 0
    while True:
        byte = (await wire.read(1))[0]
        length |= (byte & 0x7F) << shift
        shift += 7
        if length > MAX_MESSAGE:
            raise P2pdError(f"its message is longer than {MAX_MESSAGE} bytes")
        if not byte & 0x80:
            return await wire.read(length)
