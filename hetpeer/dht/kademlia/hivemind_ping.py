"""First contact with a node of hivemind's DHT that is no peer of ours: one of hivemind's pings.

Its calls are protobufs of p2pd's on a stream of their own, so none of hivemind's classes is needed.
"""

from __future__ import annotations

import asyncio
import math
import uuid

import base58
from google.protobuf.message import DecodeError

from hetpeer.dht.base.errors import PeerLostError, ProtocolError
from hetpeer.dht.base.runtime import Clock
from hetpeer.dht.base.untrusted import varint
from hetpeer.dht.p2pd.p2pd_control import P2pdControl, read_message

PROTOCOL = "DHTProtocol.rpc_ping"


async def clock_offset(control: P2pdControl, clock: Clock, peer_id: str, timeout_s: float) -> float:
    """The wall clock of the DHT node `peer_id` minus ours, in seconds.

    Raises `RemoteError`, also if it is no DHT node.
    """
    from hivemind.proto import dht_pb2, p2pd_pb2

    ping = dht_pb2.PingRequest().SerializeToString()
    call = p2pd_pb2.CallUnaryRequest(peer=base58.b58decode(peer_id), proto=PROTOCOL, data=ping)
    request = p2pd_pb2.PersistentConnectionRequest(callId=uuid.uuid4().bytes, callUnary=call)
    message = request.SerializeToString()
    wire = await control.open_wire(peer_id, PROTOCOL, timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            asked_at = clock.wall()
            await wire.write([varint(len(message)), message])
            answer = p2pd_pb2.PersistentConnectionRequest.FromString(await read_message(wire))
            midway = (asked_at + clock.wall()) / 2
        said = dht_pb2.PingResponse.FromString(answer.unaryResponse.response)
    except DecodeError as error:
        raise ProtocolError("an answer to a ping that is none", peer=peer_id) from error
    except TimeoutError:
        raise PeerLostError(peer_id, "no answer in time") from None
    finally:
        wire.abort()
    if not said.peer.node_id or not math.isfinite(said.dht_time):
        raise ProtocolError("an answer to a ping without a node or a time", peer=peer_id)
    return float(said.dht_time) - midway
