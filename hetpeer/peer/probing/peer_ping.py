"""Round trip to a peer, and the network coordinate that it answers with (docs/joining.md)."""

from __future__ import annotations

import asyncio

from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.node.node import Node
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.probing.probe_service import PROTOCOL
from hetpeer.stages.planning.network_coordinates import Coordinate

PINGS = 2
"""Pings of a peer, of which the quicker counts."""
LONGEST_S = 3.0


async def ping(stream: Stream) -> tuple[float, Coordinate | None]:
    """Least round trip in seconds over a stream of probes, and the other end's coordinate, if it knows it.

    Raises `RemoteError`.
    """
    loop, least_s, coordinate = asyncio.get_running_loop(), float("inf"), None
    for number in range(PINGS):
        sent = loop.time()
        await stream.send({"ping": number})
        header = (await stream.receive(payload_limit=0)).header
        least_s = min(least_s, loop.time() - sent)
        at = header.get("at")
        coordinate = Coordinate.of(at) if isinstance(at, list) else None
    return least_s, coordinate


async def ping_peer(node: Node, peer: str) -> tuple[float, Coordinate | None] | None:
    """As `ping`, over a new stream; None if `peer` does not answer, or is behind a relay, whose way it is."""
    try:
        async with asyncio.timeout(LONGEST_S):
            stream = await node.open(peer, PROTOCOL, timeout_s=LONGEST_S)
            try:
                answer = await ping(stream)
                path = node.path(peer)
            finally:
                stream.abort()
    except (RemoteError, TimeoutError):
        return None
    return None if path is not None and path.relay else answer
