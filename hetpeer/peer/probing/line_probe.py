"""Measure the line of this machine: bytes down and up, over several peers at once (docs/joining.md).

First each peer is pinged. Meanwhile the node looks for a way past libp2p, as tensors have it. Then bytes come
down, and others go up. Whatever goes wrong, the result is what is known by then: a volunteer joins all the
same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetpeer.dht.base.errors import ProtocolError, RemoteError, short_id
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.node.node import Node
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.probing.line_estimate import MOST_PIECE, UNKNOWN, LineRate, OneWay
from hetpeer.peer.probing.peer_ping import ping
from hetpeer.peer.probing.probe_service import PROTOCOL
from hetpeer.stages.planning.network_coordinates import Coordinate

BYTES = 4_000_000
"""Most bytes of a probe, both directions and all peers together."""
LONGEST_S = 3.0
OPEN_S, GRANT_S = 0.9, 0.6
"""Seconds in which a peer is reached, and in which it grants bytes. The two directions share what is left."""
SPARE_S = 0.1
DOWN, UP = "down", "up"
"""Kinds of frames, and names of the directions."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedLine:
    """Result of a probe; what it could not find is unknown."""

    uplink: LineRate = UNKNOWN
    downlink: LineRate = UNKNOWN
    trips: Mapping[str, float] = field(default_factory=dict)
    """Peer → least round trip in seconds."""
    coordinates: Mapping[str, Coordinate | None] = field(default_factory=dict)
    """Peer that is reached without a relay → its network coordinate; None: it knows none yet."""
    nbytes: int = 0
    """Bytes that were sent, or asked for, without heads."""
    seconds: float = 0.0


async def probe_line(
    node: Node, peers: Iterable[str], nbytes: int = BYTES, longest_s: float = LONGEST_S
) -> ProbedLine:
    """Measure the line of `node` over `peers`, with at most `nbytes` in `longest_s`. Never raises."""
    loop, probe = asyncio.get_running_loop(), _Probe(node, nbytes)
    began = loop.time()
    try:
        async with asyncio.timeout(longest_s):
            await probe.run(peers, began + longest_s - SPARE_S)
    except TimeoutError:
        _log.debug("the probe took longer than %.0f s", longest_s)
    finally:
        await probe.close()
    return probe.result(loop.time() - began)


class _Probe:
    """One probe under way."""

    def __init__(self, node: Node, nbytes: int) -> None:
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._nbytes = nbytes
        self._trips: dict[str, float] = {}
        self._coordinates: dict[str, Coordinate | None] = {}
        self._streams: dict[str, Stream] = {}
        """Peer → stream over which bytes are granted."""
        self._ways: dict[str, OneWay] = {}
        """Direction → what is known of it, from its beginning on."""
        self._moved = asyncio.Event()
        """Set on each arrival and loss, for those that wait for room in a window."""
        self._tasks = TaskSet()
        self._waste = memoryview(os.urandom(MOST_PIECE))
        """Random bytes to send: nothing on the way can make them shorter."""

    async def run(self, peers: Iterable[str], end: float) -> None:
        """Measure one direction after the other, until the loop's time `end`."""
        await asyncio.gather(*map(self._reach, peers))
        trips = {peer: self._trips[peer] for peer in self._streams}
        for peer in trips:
            self._tasks.spawn(self._receive(peer), name="answers to a probe")
        for kind, share in ((DOWN, 0.5), (UP, 1.0)):
            now = self._loop.time()
            way = self._ways[kind] = OneWay(trips, self._nbytes // 2, now + share * (end - now))
            await asyncio.gather(*(self._send(kind, way, peer) for peer in trips))

    async def close(self) -> None:
        """Drop what is still on its way."""
        for stream in self._streams.values():
            stream.abort()
        await self._tasks.close()

    def result(self, seconds: float) -> ProbedLine:
        """The line as far as it is known, after so many seconds."""
        rates = {kind: way.measured() for kind, way in self._ways.items()}
        return ProbedLine(
            uplink=rates.get(UP, UNKNOWN),
            downlink=rates.get(DOWN, UNKNOWN),
            trips=dict(self._trips),
            coordinates=dict(self._coordinates),
            nbytes=sum(self._nbytes // 2 - way.left for way in self._ways.values()),
            seconds=seconds,
        )

    async def _reach(self, peer: str) -> None:
        """Ping `peer`, and have it grant bytes, directly if there is a way. Never raises."""
        with contextlib.suppress(TimeoutError):
            try:
                async with asyncio.timeout(OPEN_S + GRANT_S):
                    stream = await self._pinged(peer)
                    if stream is None:
                        return
                    self._streams[peer] = stream
                    await stream.send({"ask": self._nbytes})
                    answer = (await stream.receive(payload_limit=0)).header
                    if answer.get("grant") == self._nbytes:
                        return
                    _log.debug("%s is not to be probed now", short_id(peer))
            except RemoteError as error:  # an older version, among others
                _log.debug("%s cannot be probed: %s", short_id(peer), error)
        if (lost := self._streams.pop(peer, None)) is not None:
            lost.abort()

    async def _pinged(self, peer: str) -> Stream | None:
        """The stream to `peer` for its bytes; None if there is a relay between, whose line would be measured.

        The round trip is known then. Raises `RemoteError`.
        """
        end = self._loop.time() + OPEN_S
        stream = await self._node.open(peer, PROTOCOL, timeout_s=OPEN_S)
        try:
            await self._ping(stream)
            left_s = end - self._loop.time()
            path = self._node.path(peer)
            if path is not None and path.relay:
                self._coordinates.pop(peer, None)
                stream.close()
                return None
            direct = await self._node.open_directly(peer, PROTOCOL, timeout_s=left_s) if left_s > 0 else None
        except BaseException:
            stream.abort()
            raise
        if direct is None:
            return stream
        stream.close()
        try:
            await self._ping(direct)
        except BaseException:
            direct.abort()
            raise
        return direct

    async def _ping(self, stream: Stream) -> None:
        """Note the least round trip, and where the peer is. Raises `RemoteError`."""
        took_s, coordinate = await ping(stream)
        self._trips[stream.peer_id] = min(self._trips.get(stream.peer_id, took_s), took_s)
        self._coordinates[stream.peer_id] = coordinate

    async def _send(self, kind: str, way: OneWay, peer: str) -> None:
        """Send pieces to `peer`, or ask it for them, until `way` is over. Never raises."""
        stream = self._streams[peer]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(way.end):
                while not way.over(self._loop.time()):
                    size = way.piece(peer, self._loop.time())
                    if not size:
                        self._moved.clear()
                        await self._moved.wait()
                        continue
                    way.sent(peer, size)
                    with contextlib.suppress(RemoteError):
                        await stream.send({kind: size}, *([self._waste[:size]] if kind == UP else []))

    async def _receive(self, peer: str) -> None:
        """Note what arrives from `peer`, or at it, until its stream ends."""
        stream, scratch = self._streams[peer], memoryview(bytearray(MOST_PIECE))
        try:
            while True:
                frame = await stream.receive(payload_limit=MOST_PIECE)
                kind, nbytes = _arrival(frame.header, frame.payload_length)
                await stream.receive_into(scratch[: frame.payload_length])  # within limits.down
                if (way := self._ways.get(kind)) is not None:
                    way.arrived(peer, nbytes, self._loop.time())
                self._moved.set()
        except RemoteError as error:
            _log.debug("the probe over %s ends: %s", short_id(peer), error)
            for way in self._ways.values():
                way.lost(peer)
            self._moved.set()


def _arrival(header: Mapping[str, Any], payload: int) -> tuple[str, int]:
    """(direction, bytes) of an answer. Raises `ProtocolError`."""
    if DOWN in header:
        return DOWN, payload
    if type(header.get(UP)) is not int:
        raise ProtocolError("no answer to a probe")
    return UP, header[UP]
