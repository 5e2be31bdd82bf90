"""A stream of frames between two peers: what every protocol above the network uses (docs/links.md).

frame.py lays out a frame, byte_transport.py moves the bytes, frame_guard.py ends a stream whose peer is late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.file_pieces import Readable, read
from hetpeer.dht.identity.addresses import customer_in
from hetpeer.dht.streams.abuse import MEMBER, PeerTraffic
from hetpeer.dht.streams.byte_transport import ByteTransport, Throttle, ThrottledDirection
from hetpeer.dht.streams.frame import (
    DEFAULT_PAYLOAD_LIMIT,
    MAX_HEADER,
    PREFIX,
    FrameHead,
    decode_header,
    decode_prefix,
    encode_head,
)
from hetpeer.dht.streams.frame_guard import Deadline, FrameGuard

_SKIP_CHUNK = 256 * 1024
FILE_PIECE = 1 << 20
"""Bytes of a file that are in memory at a time while it is sent or received; many transfers may be under way.
"""


class Stream:
    """One stream to `peer_id`. Any number of tasks may send; one at a time may receive.

    Use it as a context manager, or call `close`. After any error it is broken: open another one.

        async with await node.open(peer_id, "example/1") as stream:
            await stream.send({"kind": "question"}, numpy_array)
            head = await stream.receive(payload_limit=1 << 20)
            answer = await stream.receive_bytes(1 << 20)
    """

    def __init__(self, wire: ByteTransport, *, peer_id: str, protocol: str, address: str = "") -> None:
        wire.peer = peer_id
        self.peer_id = peer_id
        self.address = address
        """Address from which an incoming stream comes."""
        self.protocol = protocol
        self._wire = wire
        self.pace = MEMBER
        """Delivery required of the peer while one of its frames is incomplete."""
        self.used_at = asyncio.get_running_loop().time()
        """Loop time at which a payload last began or ended, in either direction."""
        self._throttle: Throttle | None = None
        self._sending = asyncio.Lock()
        self._payload_left = 0

    @property
    def broken(self) -> bool:
        """Whether the stream has ended or failed."""
        return self._wire.lost is not None

    @property
    def network(self) -> str:
        """The internet network that an incoming stream is from; empty if unknown or not of the internet."""
        return customer_in(self.address)

    @property
    def delivered(self) -> int:
        """Bytes sent that the kernel has taken."""
        return self._wire.delivered

    @property
    def busy(self) -> bool:
        """Whether a frame is under way in either direction."""
        return self._sending.locked() or self._payload_left > 0

    async def send(self, header: Mapping[str, Any], *payload: Any, timeout_s: float | None = None) -> None:
        """Send one frame; `payload` is any number of C-contiguous buffers, sent one after the other.

        Returns when the kernel holds every byte, so the buffers may be reused; waits while the peer is slow.
        Raises `PeerLostError`. If cancelled before its turn, it sends nothing; if cancelled half-way, it
        breaks the stream.
        """
        buffers = [memoryview(part).cast("B") for part in payload]
        head = encode_head(header, sum(len(part) for part in buffers))
        up = self._throttle.up if self._throttle is not None else None
        async with Deadline(self._wire, timeout_s, "took no data"), self._sending:
            self._use(len(buffers))
            if up is not None and not up.unlimited and buffers:
                up.passed(len(head))
                await self._wire.write([head])
                await self._in_turn(
                    up, buffers, lambda piece: self._wire.write([piece]), "a message was given up half-way"
                )
            else:
                if up is not None:
                    up.passed(len(head) + sum(map(len, buffers)))
                await self._wire.write([head, *buffers])
            self._use(len(buffers))

    async def send_file(
        self, header: Mapping[str, Any], source: Readable, *, timeout_s: float | None = None
    ) -> None:
        """Send one frame with the bytes of `source` as its payload, which are read piece by piece.

        As `send`; also raises OSError if the source cannot be read, and breaks the stream then.
        """
        head = encode_head(header, source.nbytes)
        up = self._throttle.up if self._throttle is not None else None
        async with Deadline(self._wire, timeout_s, "took no data"), self._sending:
            self._use(source.nbytes)
            if up is not None:
                up.passed(len(head))
            try:
                await self._wire.write([head])
                for begin in range(0, source.nbytes, FILE_PIECE):
                    size = min(FILE_PIECE, source.nbytes - begin)
                    piece = memoryview(await asyncio.to_thread(read, source, begin, size))
                    for part in (piece,) if up is None or up.unlimited else up.pieces(piece):
                        if up is not None:
                            await up.turn(len(part))
                        await self._wire.write([part])
            except BaseException:
                self._wire.abort("a file was given up half-way")
                raise
            self._use(source.nbytes)

    def count(self, traffic: PeerTraffic) -> None:
        """Judge this stream together with the peer's others, whose bytes count in `traffic` too."""
        self._wire.count(traffic)

    def pace_to(self, rate: float) -> None:
        """Send at most `rate` bytes/s where the kernel can do that (`ByteTransport.pace_to`)."""
        self._wire.pace_to(rate)

    def throttle(self, throttle: Throttle) -> None:
        """Send and receive within the node's limits, and count there."""
        self._throttle = throttle

    async def receive(
        self,
        *,
        payload_limit: int = DEFAULT_PAYLOAD_LIMIT,
        header_limit: int = MAX_HEADER,
        timeout_s: float | None = None,
        silence_s: float | None = None,
    ) -> FrameHead:
        """The next frame's head. Take its payload with one of the methods below before the next `receive`.

        Raises `ProtocolError` for bytes that are no frame or announce more than the limits allow,
        `OffenceError` for a stream that drips, and `PeerLostError` if the stream ends, the head is incomplete
        after `timeout_s` seconds, or nothing came from the peer in any stream for `silence_s` seconds. All of
        them break the stream. If cancelled before the head is complete, nothing is lost.
        """
        if self._payload_left:
            raise RuntimeError("the payload of the previous frame was not taken")
        async with Deadline(self._wire, timeout_s, "sent no complete message"), self._guard(None, silence_s):
            try:
                # One peeked head, consumed as a whole: a cancelled receive can be called again.
                header_length, payload_length = decode_prefix(
                    await self._wire.peek(PREFIX.size),
                    payload_limit=payload_limit,
                    header_limit=header_limit,
                )
                head = await self._wire.read(PREFIX.size + header_length)
                header = decode_header(head[PREFIX.size :])
            except ProtocolError as error:
                raise self._refuse(error) from error
        self._payload_left = payload_length
        self._use(payload_length)
        if self._throttle is not None:
            self._throttle.down.passed(len(head))
        return FrameHead(header=header, payload_length=payload_length)

    async def receive_into(self, target: Any, *, timeout_s: float | None = None) -> None:
        """Read the payload straight into `target`, a writable buffer of exactly its length.

        Raises `ProtocolError` if the lengths differ, else as `receive`. If cancelled, it breaks the stream.
        """
        view = memoryview(target).cast("B")
        if len(view) != self._payload_left:
            raise self._refuse(
                ProtocolError(f"a payload of {self._payload_left} bytes where {len(view)} were due")
            )
        down = self._throttle.down if self._throttle is not None else None
        async with Deadline(self._wire, timeout_s, "did not finish a payload"), self._guard(len(view)):
            if down is not None and not down.unlimited:
                await self._in_turn(down, [view], self._wire.read_into, "a payload was given up half-way")
            else:
                if down is not None:
                    down.passed(len(view))
                await self._wire.read_into(view)
        self._payload_left = 0

    async def receive_bytes(self, limit: int, *, timeout_s: float | None = None) -> bytearray:
        """The payload as new memory of at most `limit` bytes; errors as `receive_into`."""
        if self._payload_left > limit:
            raise self._refuse(
                ProtocolError(f"a payload of {self._payload_left} bytes; the limit here is {limit}")
            )
        data = bytearray(self._payload_left)
        await self.receive_into(data, timeout_s=timeout_s)
        return data

    async def receive_pieces(self, take: Callable[[int, memoryview], Awaitable[None]]) -> None:
        """Have `take(begin, piece)` take the payload piece by piece; a piece is valid until it returns.

        Errors as `receive_into`, and those of `take`. Any of them, and a cancellation, breaks the stream.
        """
        buffer = memoryview(bytearray(min(self._payload_left, FILE_PIECE)))
        down = self._throttle.down if self._throttle is not None else None
        length = self._payload_left
        try:
            async with self._guard(length):
                for begin in range(0, length, FILE_PIECE):
                    piece = buffer[: length - begin]
                    for part in (piece,) if down is None or down.unlimited else down.pieces(piece):
                        if down is not None:
                            await down.turn(len(part))
                        await self._wire.read_into(part)
                    await take(begin, piece)
        except BaseException:
            self._wire.abort("a payload was given up half-way")
            raise
        self._payload_left = 0

    async def skip(self) -> None:
        """Read and drop the payload; errors as `receive_into`."""
        waste = memoryview(bytearray(min(self._payload_left, _SKIP_CHUNK)))
        async with self._guard(self._payload_left):
            while self._payload_left:
                chunk = waste[: self._payload_left]
                await self._wire.read_into(chunk)
                if self._throttle is not None:
                    self._throttle.down.passed(len(chunk))
                self._payload_left -= len(chunk)

    def close(self) -> None:
        """Let sent frames out, then close both directions. Idempotent."""
        self._wire.close()

    def abort_unless_begun(self) -> None:
        """Close at once if nothing has come yet."""
        if not self._wire.delivery.nbytes:
            self._wire.abort("its first byte did not come")

    def abort(self) -> None:
        """Close at once; bytes that the peer does not have yet are lost. Idempotent."""
        self._wire.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __repr__(self) -> str:
        state = f"broken: {self._wire.lost}" if self.broken else "open"
        return f"<Stream {self.protocol} to {self.peer_id}, {state}>"

    async def _in_turn(
        self,
        direction: ThrottledDirection,
        buffers: Sequence[memoryview],
        move: Callable[[memoryview], Awaitable[None]],
        broken: str,
    ) -> None:
        """Move `buffers` as the node's limit allows; `broken`: why a cancellation breaks the stream."""
        try:
            for buffer in buffers:
                for piece in direction.pieces(buffer):
                    await direction.turn(len(piece))
                    await move(piece)
        except asyncio.CancelledError:
            self._wire.abort(broken)
            raise

    def _guard(self, length: int | None, silence_s: float | None = None) -> FrameGuard:
        return FrameGuard(self._wire, self.pace, length, silence_s)

    def _use(self, payload: int) -> None:
        """Note the time of a frame with a payload; frames without one only show that the peer is alive."""
        if payload:
            self.used_at = asyncio.get_running_loop().time()

    def _refuse(self, error: ProtocolError) -> ProtocolError:
        """The same error with the peer named. The stream is broken, since its next frame cannot be found."""
        self.abort()
        return ProtocolError(error.what, peer=self.peer_id, why=error.why)
