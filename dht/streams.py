"""Streams of frames between two peers: what every protocol above the network speaks.

A `Stream` is one libp2p stream behind p2pd: ordered, encrypted, and `peer_id` is proved by the handshake. Nothing in
it trusts the other side: sizes are limited before memory is used, and every wait can be given a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from hetpeer.dht.errors import PeerLostError, ProtocolError
from hetpeer.dht.frames import (
    DEFAULT_PAYLOAD_LIMIT,
    PREFIX,
    Header,
    decode_header,
    decode_prefix,
    encode_head,
)
from hetpeer.dht.wire import Wire

_SKIP_CHUNK = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The head of a received frame; its payload is still to be taken from the stream."""

    header: Header
    payload_length: int


class Stream:
    """One stream to `peer_id`. Any number of tasks may send, one at a time may receive.

    Use it as a context manager, or call `close`. After any error it is broken: open another one.
    """

    def __init__(self, wire: Wire, *, peer_id: str, protocol: str) -> None:
        wire.peer = peer_id
        self.peer_id = peer_id
        self.protocol = protocol
        self._wire = wire
        self._sending = asyncio.Lock()
        self._payload_left = 0

    @property
    def broken(self) -> bool:
        return self._wire.lost is not None

    async def send(self, header: Mapping[str, Any], *payload: Any, timeout_s: float | None = None) -> None:
        """Send one frame; `payload` is any number of C-contiguous buffers, sent one after the other.

        Returns when the kernel holds every byte, so the buffers may be reused; waits while the peer is slow. Raises
        `PeerLostError`. Cancelled before its turn it sends nothing; cancelled half-way it breaks the stream.
        """
        buffers = [memoryview(part).cast("B") for part in payload]
        head = encode_head(header, sum(len(part) for part in buffers))
        async with self._deadline(timeout_s, "took no data"), self._sending:
            await self._wire.write([head, *buffers])

    async def receive(
        self, *, payload_limit: int = DEFAULT_PAYLOAD_LIMIT, timeout_s: float | None = None
    ) -> Frame:
        """The next frame's head; then take its payload with one of the methods below before the next `receive`.

        Raises `ProtocolError` for what is not a frame or announces more than `payload_limit` bytes, `PeerLostError`
        when the stream ends or the whole head is not here after `timeout_s` seconds; both break the stream. Cancelled
        before the head is complete it loses nothing.
        """
        if self._payload_left:
            raise RuntimeError("the payload of the previous frame was not taken")
        async with self._deadline(timeout_s, "sent no complete message"):
            try:
                # One peeked head, consumed as a whole: a cancelled receive can be called again.
                header_length, payload_length = decode_prefix(
                    await self._wire.peek(PREFIX.size), payload_limit=payload_limit
                )
                head = await self._wire.read(PREFIX.size + header_length)
                header = decode_header(head[PREFIX.size :])
            except ProtocolError as error:
                raise self._refuse(error) from error
        self._payload_left = payload_length
        return Frame(header=header, payload_length=payload_length)

    async def receive_into(self, target: Any, *, timeout_s: float | None = None) -> None:
        """Take the payload straight into `target`, a writable buffer of exactly its length.

        Raises `ProtocolError` when the lengths differ, else as `receive`. Cancelled, it breaks the stream.
        """
        view = memoryview(target).cast("B")
        if len(view) != self._payload_left:
            raise self._refuse(
                ProtocolError(f"a payload of {self._payload_left} bytes where {len(view)} were due")
            )
        async with self._deadline(timeout_s, "did not finish a payload"):
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

    async def skip(self, *, timeout_s: float | None = None) -> None:
        """Read and drop the payload; errors as `receive_into`."""
        waste = memoryview(bytearray(min(self._payload_left, _SKIP_CHUNK)))
        async with self._deadline(timeout_s, "did not finish a payload"):
            while self._payload_left:
                chunk = waste[: self._payload_left]
                await self._wire.read_into(chunk)
                self._payload_left -= len(chunk)

    def close(self) -> None:
        """Let sent frames out, then close both directions. Idempotent."""
        self._wire.close()

    def abort(self) -> None:
        """Close at once; what the peer has not got yet is lost. Idempotent."""
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

    def _deadline(self, timeout_s: float | None, what: str) -> AbstractAsyncContextManager[None]:
        return _Deadline(self, timeout_s, f"it {what} within {timeout_s} s")

    def _refuse(self, error: ProtocolError) -> ProtocolError:
        """The same error with the peer named; the stream is over, as its next frame cannot be found."""
        self.abort()
        return ProtocolError(error.what, peer=self.peer_id, why=error.why)


class _Deadline(AbstractAsyncContextManager[None]):
    """Turns a missed deadline into a broken stream and a `PeerLostError`."""

    def __init__(self, stream: Stream, timeout_s: float | None, why: str) -> None:
        self._stream = stream
        self._timeout = asyncio.timeout(timeout_s)
        self._why = why

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            self._stream.abort()
            raise PeerLostError(self._stream.peer_id, self._why) from None
