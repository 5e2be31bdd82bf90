"""Ends of a stream whose peer is late: a deadline, and a guard that an incomplete frame makes progress."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType

from hetpeer.dht.base.errors import PeerLostError
from hetpeer.dht.streams.abuse import FRAME_S, DeliveryPace, DeliveryState, FrameWatch, Offence, OffenceError
from hetpeer.dht.streams.byte_transport import ByteTransport
from hetpeer.dht.streams.frame import MAX_HEADER

GUARD_S = 1.0
"""Seconds between looks at an incomplete frame."""


@dataclass(slots=True)
class _Heard:
    """Time at which bytes came last (loop time), and their total number by then."""

    at: float
    nbytes: int


def _drip(wire: ByteTransport) -> OffenceError:
    return OffenceError(Offence.DRIP, "a stream that drips", peer=wire.peer)


class FrameGuard(AbstractAsyncContextManager[None]):
    """Checks once a second that an incomplete frame makes progress, and breaks the stream if not.

    `pace`: the delivery required of the peer. `length` None: a head, which may begin at any time unless the
    peer is silent for `silence_s`.
    """

    def __init__(
        self, wire: ByteTransport, pace: DeliveryPace, length: int | None, silence_s: float | None = None
    ) -> None:
        self._wire = wire
        self._pace = pace
        self._length = length
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._watch: FrameWatch | None = None
        """Watch of the frame, made at the first look that finds it incomplete: most frames never need one."""
        self._drips = False

    async def __aenter__(self) -> None:
        now, self._delivery = self._loop.time(), self._wire.delivery
        self._began = now, self._delivery.nbytes, self._delivery.peer.nbytes
        self._own, self._peer = _Heard(now, self._began[1]), _Heard(now, self._began[2])
        self._timer = self._loop.call_later(GUARD_S, self._look)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._wire.delivery.drips = self._watch is not None and self._watch.drips
        if self._drips and isinstance(error, PeerLostError):
            raise _drip(self._wire) from None

    def _look(self) -> None:
        """Abort the stream if the peer is silent or drips; otherwise look again in GUARD_S."""
        now, delivery = self._loop.time(), self._wire.delivery
        for heard, nbytes in ((self._peer, delivery.peer.nbytes), (self._own, delivery.nbytes)):
            if nbytes > heard.nbytes:
                heard.at, heard.nbytes = now, nbytes
        if self._watch is None and self._length is not None:
            self._watch = FrameWatch(self._delivery, self._length, self._began, self._pace)
        elif self._watch is None and self._wire.pending:
            began = now, delivery.nbytes, delivery.peer.nbytes
            self._watch = FrameWatch(delivery, MAX_HEADER, began, self._pace)
        silent = self._silence_s is not None and (
            now - self._peer.at >= self._silence_s or now - self._own.at >= FRAME_S
        )
        verdict = DeliveryState.FINE if self._watch is None else self._watch.judge(now)
        if silent or verdict is not DeliveryState.FINE:
            self._drips = verdict is DeliveryState.DRIPS
            self._wire.abort("it is silent" if silent else verdict.value)
            return
        self._timer = self._loop.call_later(GUARD_S, self._look)


class Deadline(AbstractAsyncContextManager[None]):
    """Turns a missed deadline into a broken stream and a `PeerLostError`."""

    def __init__(self, wire: ByteTransport, timeout_s: float | None, what: str) -> None:
        self._wire = wire
        self._timeout = asyncio.timeout(timeout_s)
        self._why = f"it {what} within {timeout_s} s"

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            self._wire.abort()
            if self._wire.delivery.drips:
                raise _drip(self._wire) from None
            raise PeerLostError(self._wire.peer, self._why) from None
