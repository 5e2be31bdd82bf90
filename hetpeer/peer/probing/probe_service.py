"""The answering side of probes: pings, and bytes up and down within an allowance (docs/joining.md).

A frame of the asker is one of these, and has one answer, in order:

    {"ping": n}             {"ping": n, "at": the network coordinate, if it is known}
    {"ask": bytes}          {"grant": bytes}, 0: not now; once a stream
    {"up": n} + n bytes     {"up": n}
    {"down": n}             {"down": n} + n bytes

One probe at a time is under way. A stream over which nothing was granted carries no payload, so what others
can take of our line is what the allowance says.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from hetpeer.dht.base.errors import PeerLostError, ProtocolError
from hetpeer.dht.p2pd.listener import StreamBudget
from hetpeer.dht.streams.abuse import MEMBER
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.probing.line_estimate import MOST_PIECE
from hetpeer.peer.probing.probe_allowance import PER_PEER, ProbeAllowance

PROTOCOL: Final = "hetpeer/1/probe"
BUDGET = StreamBudget(per_peer=2, strangers=32, pace=MEMBER)
"""A stream over libp2p, and the direct one that replaces it."""
PINGS_S, GRANT_S, PER_BYTE_S = 3.0, 2.5, 1e-6
"""Seconds for the pings of a stream, and for the bytes that it was granted: so many, or more for many."""
WAIT_S = 0.5
"""Seconds for which one probe waits for another to end."""
MAX_PINGS = 64
RELIABLE_BYTES, VOLUNTEER_BYTES = 128_000_000, 64_000_000
"""Bytes for probes in an hour: 0.3 Mbit/s of a reliable peer's line at most, and 0.15 of a volunteer's."""


class ProbeService:
    """Answers probes with `total` bytes an hour; pass `handle` to `Node.serve`."""

    def __init__(self, total: int, coordinate: Callable[[], Sequence[int]] = tuple) -> None:
        """`coordinate`: our network coordinate, for those that ping us."""
        self._coordinate = coordinate
        self._allowance = ProbeAllowance(total)
        self._turn = asyncio.Lock()
        self._waste = os.urandom(MOST_PIECE)
        """Random bytes to send: nothing on the way can make them shorter."""

    async def handle(self, stream: Stream) -> None:
        """Answer until the asker closes `stream`, or its time is over.

        Raises `ProtocolError` if it sends anything else, or takes more than it was granted.
        """
        with suppress(PeerLostError, TimeoutError):
            async with asyncio.timeout(PINGS_S):
                asked = await self._pings(stream)
            if not await self._has_turn():
                await stream.send({"grant": 0})
                return
            try:
                async with asyncio.timeout(max(GRANT_S, PER_BYTE_S * min(asked, PER_PEER))):
                    await self._granted(stream, asked)
            finally:
                self._turn.release()

    async def _pings(self, stream: Stream) -> int:
        """Answer pings until bytes are asked for; returns how many. Raises as `handle`."""
        for _ in range(MAX_PINGS):
            header = (await stream.receive(payload_limit=0)).header
            if "ask" in header:
                return _count(header, "ask", stream)
            at = [*self._coordinate()]
            await stream.send({"ping": _count(header, "ping", stream), **({"at": at} if at else {})})
        raise ProtocolError("pings without end", peer=stream.peer_id)

    async def _has_turn(self) -> bool:
        """Wait for the turn, WAIT_S at most."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            return False
        return True

    async def _granted(self, stream: Stream, asked: int) -> None:
        """Grant what is left of what was `asked`, and answer as long as that lasts."""
        now = asyncio.get_running_loop().time()
        grant = self._allowance.grant(stream.peer_id, stream.network, asked, now)
        left, scratch = grant.nbytes, memoryview(bytearray(MOST_PIECE))
        try:
            await stream.send({"grant": left})
            while left:
                frame = await stream.receive(payload_limit=min(left, MOST_PIECE))
                if "down" in frame.header:
                    size = _count(frame.header, "down", stream, min(left, MOST_PIECE))
                    left -= size
                    await stream.send({"down": size}, memoryview(self._waste)[:size])
                else:
                    size = _count(frame.header, "up", stream, frame.payload_length)
                    left -= frame.payload_length
                    await stream.receive_into(scratch[: frame.payload_length])  # within limits.down
                    await stream.send({"up": size})
        finally:
            self._allowance.ended(grant, grant.nbytes - left)


def _count(header: Mapping[str, Any], name: str, stream: Stream, most: int = 1 << 40) -> int:
    """The number called `name` in a head, 0 to `most`. Raises `ProtocolError`."""
    value = header.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise ProtocolError(f"a probe without a right {name!r}", peer=stream.peer_id)
    return value
