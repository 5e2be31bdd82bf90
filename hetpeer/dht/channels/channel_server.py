"""Streams for channels: the dialling side reopens broken ones, the serving side finds the channel again."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

from hetpeer.dht.base.errors import PeerLostError, ProtocolError, RemoteError
from hetpeer.dht.channels.channel import Channel, ChannelReceiver
from hetpeer.dht.channels.redial import TRY_S, pause_s
from hetpeer.dht.node.node import Node
from hetpeer.dht.streams.frame import MAX_HEADER
from hetpeer.dht.streams.rate_meter import RateMeter
from hetpeer.dht.streams.stream import Stream

MAX_LANES = 4
"""Channels of one protocol that a peer may have with us at a time."""
OPENING_BYTES = 1 << 10
"""Most bytes of the header that opens a stream, or answers that."""

_log = logging.getLogger(__name__)


async def dial(node: Node, protocol: str, channel: Channel, give_up_s: float = math.inf) -> None:
    """Keep `channel` connected until it is closed; returns then.

    Raises `PeerLostError` if the peer no longer knows the channel (its process was restarted): work under way
    is lost and the owner starts again. An unreachable peer is dialled again for `give_up_s` seconds.
    """
    attempt = 0
    begun = False
    lost_at = asyncio.get_running_loop().time()
    while not channel.closed:
        due = asyncio.get_running_loop().time() + TRY_S
        try:
            with node.reaching(channel.peer_id):
                stream = await node.open(channel.peer_id, protocol, timeout_s=TRY_S)
                if channel.closed:  # a late hello would end the channel that has replaced this one
                    stream.close()
                    return
                hello = {"key": channel.key, "lane": channel.lane, "has": channel.received, "begun": begun}
                began = asyncio.get_running_loop().time()
                await stream.send(hello, timeout_s=max(0.1, due - began))
                left_s = max(0.1, due - asyncio.get_running_loop().time())
                answer = await _opening(stream, left_s)
                channel.trip_s = min(channel.trip_s, asyncio.get_running_loop().time() - began)
        except RemoteError as error:
            _log.debug("dialling %r: %s", channel, error)
            if asyncio.get_running_loop().time() - lost_at > give_up_s:
                raise PeerLostError(channel.peer_id, f"it was not reached for {give_up_s:.0f} s") from error
            await asyncio.sleep(pause_s(attempt))
            attempt += 1
            continue
        if answer.get("lost"):
            stream.close()
            raise PeerLostError(channel.peer_id, "it does not know this channel any more")
        begun = True
        peer_has = answer.get("has")
        before = channel.received, channel.outbox.acknowledged
        await channel.carry(stream, peer_has if isinstance(peer_has, int) else 0)
        lost_at = asyncio.get_running_loop().time()
        # A stream that carried nothing is no progress: a peer that cannot read us is not dialled in a hot
        # loop.
        attempt = 0 if (channel.received, channel.outbox.acknowledged) > before else attempt + 1
        await asyncio.sleep(0.0 if channel.closed else pause_s(attempt))


async def _opening(stream: Stream, timeout_s: float) -> dict[str, Any]:
    """The header of the other side's first frame, which has no payload. Raises as `Stream.receive`."""
    frame = await stream.receive(payload_limit=0, header_limit=OPENING_BYTES, timeout_s=timeout_s)
    return frame.header


class ChannelServer:
    """Accepts channels of one protocol.

    `accept` makes the receiver of a new channel, or returns None to refuse the peer. `meters` gives the meter
    of the link from a peer, shared by all its channels. A peer may have one channel in each of `lanes`, all
    with one key: a new key replaces all of the peer's channels.
    """

    def __init__(
        self,
        accept: Callable[[str, str], ChannelReceiver | None],
        payload_limit: int,
        meters: Callable[[str], RateMeter] | None = None,
        lanes: int = MAX_LANES,
        header_limit: int = MAX_HEADER,
    ) -> None:
        self._accept = accept
        self._lanes = lanes
        self._meters = meters
        self._payload_limit, self._header_limit = payload_limit, header_limit
        self.channels: dict[tuple[str, int], Channel] = {}
        """(peer id, lane) → the newest channel there."""

    def __iter__(self) -> Iterator[Channel]:
        return iter(list(self.channels.values()))

    def keep_only(self, peers: Collection[str]) -> None:
        """Forget channels of other peers that are down."""
        gone = [place for place, c in self.channels.items() if c.peer_id not in peers and not c.is_up]
        for place in gone:
            self.channels.pop(place).close()

    async def handle(self, stream: Stream) -> None:
        """Serve one incoming stream; passed to `Node.serve`. Raises `ProtocolError`."""
        hello = await _opening(stream, 5.0)
        key, peer_has, begun = hello.get("key"), hello.get("has"), hello.get("begun")
        lane = hello.get("lane", 0)
        if not isinstance(key, str) or len(key) > 128 or not isinstance(peer_has, int):
            raise ProtocolError("a channel without key", peer=stream.peer_id)
        if not isinstance(lane, int) or not 0 <= lane < self._lanes:
            raise ProtocolError(f"a channel in lane {lane!r}", peer=stream.peer_id)
        channel = self.channels.get((stream.peer_id, lane))
        if channel is None or channel.key != key or channel.closed:
            receiver = None if begun else self._accept(stream.peer_id, key)
            if receiver is None:
                await stream.send({"lost": True}, timeout_s=5.0)
                return
            self._end_others(stream.peer_id, key, lane)
            channel = Channel(stream.peer_id, key, receiver, self._payload_limit, lane, self._header_limit)
            channel.meter = self._meters(stream.peer_id) if self._meters is not None else None
            self.channels[stream.peer_id, lane] = channel
        channel.address = stream.address
        await stream.send({"has": channel.received}, timeout_s=5.0)
        wrong: list[ProtocolError] = []
        channel.offended = wrong.append
        await channel.carry(stream, peer_has)
        for error in wrong:
            raise error

    def _end_others(self, peer_id: str, key: str, lane: int) -> None:
        """Close the channels that a new one with `key` in `lane` replaces."""
        for place in ((peer_id, one) for one in range(self._lanes)):
            channel = self.channels.get(place)
            if channel is not None and (channel.key != key or channel.lane == lane):
                self.channels.pop(place).close()

    def close(self) -> None:
        """Close every channel and accept no more. Handlers that still run keep no reference to our owner."""
        while self.channels:
            self.channels.popitem()[1].close()
        self._accept, self._meters = _nobody, None


def _nobody(_peer: str, _key: str) -> None:
    """Accept no channel."""
