"""Measurement of one line because a coordinator asks for it, before it moves anybody (docs/planning.md).

A frame of the coordinator over `hetpeer/1/line`, and the answer:

    {"to": peer id}    {"up": bytes/s, "down": bytes/s, "trip": seconds}, 0: not known

Only reliable peers of the run may ask. A volunteer measures one line at a time, and no more than PER_HOUR in
an hour; on a metered line it measures none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from hetpeer.dht.base.errors import PeerLostError, ProtocolError
from hetpeer.dht.node.node import Node
from hetpeer.dht.p2pd.listener import StreamBudget
from hetpeer.dht.streams.abuse import MEMBER
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.probing.line_probe import probe_line

PROTOCOL: Final = "hetpeer/1/line"
BUDGET = StreamBudget(per_peer=2, strangers=8, pace=MEMBER)
BYTES = 12_000_000
"""Bytes of one measurement, both directions together: a far line needs many until TCP is as fast as it."""
LONGEST_S = 12.0
"""Longest measurement. On a line of 20 Mbit/s and 290 ms TCP takes two seconds each way until it is fast."""
PER_HOUR = 6
"""At most 72 MB in an hour: 0.16 Mbit/s."""
ASK_S = 30.0
"""Longest wait for an answer: the volunteer may measure another line first."""
MOST_ID = 128


class MeasurementService:
    """Measures lines of `node` for `reliable` peers, whenever that is `allowed`."""

    def __init__(
        self, node: Node, reliable: Callable[[], Collection[str]], allowed: Callable[[], bool]
    ) -> None:
        self._node, self._reliable, self._allowed = node, reliable, allowed
        self._turn = asyncio.Lock()
        self._times: deque[float] = deque(maxlen=PER_HOUR)

    async def handle(self, stream: Stream) -> None:
        """Answer one question. Raises `ProtocolError` if a stranger asks, or nonsense is asked."""
        if stream.peer_id not in self._reliable():
            raise ProtocolError("only reliable peers may have lines measured", peer=stream.peer_id)
        with suppress(PeerLostError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                to = (await stream.receive(payload_limit=0)).header.get("to")
                if not isinstance(to, str) or len(to) > MOST_ID:
                    raise ProtocolError("a line to nobody", peer=stream.peer_id)
                async with self._turn:
                    await stream.send(await self._measured(to))

    async def _measured(self, to: str) -> dict[str, float]:
        now = asyncio.get_running_loop().time()
        spent = len(self._times) == PER_HOUR and now - self._times[0] < 3600.0
        if spent or not self._allowed():
            return {"up": 0.0, "down": 0.0, "trip": 0.0}
        self._times.append(now)
        found = await probe_line(self._node, [to], BYTES, LONGEST_S)
        return {"up": found.uplink.rate, "down": found.downlink.rate, "trip": found.trips.get(to, 0.0)}
