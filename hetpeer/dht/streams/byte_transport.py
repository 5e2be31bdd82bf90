"""The bytes of one connection (a unix socket to p2pd, or TLS past it), with back-pressure and no copy of
payloads; and the limits on what a node sends and receives in all its streams (docs/limits.md).

Small reads (frame heads, control messages) go through a small buffer. A payload goes from the kernel straight
into the caller's memory while the caller waits in `read_into`: the loop asks us where to put the next bytes.
A write returns only when the kernel has taken every byte, so the caller may reuse its buffers at once, and a
slow reader at the other end slows down the writer.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

from hetpeer.dht.base.errors import PeerLostError
from hetpeer.dht.streams.abuse import Delivery, PeerTraffic

Buffer = bytes | bytearray | memoryview

_SMALL_BUFFER = 16 * 1024
_JOIN_BELOW = 32 * 1024
"""Total bytes below which a write is joined: one short copy is cheaper than a second system call."""
_PIECE = 256 * 1024
"""Bytes encrypted at a time; TLS copies them into memory of its own."""
_BATCH, _RECORD = 32 * 1024, 17 * 1024
"""Bytes that arrive in the middle of a payload before the loop is woken, instead of on each packet.

A TLS record of up to 16 KiB is useless before it is complete. Part of one may have arrived already, so the
mark must be reachable with the bytes still to come.
"""
_MAX_PACING_RATE, _AS_IT_LIKES = 47, 2**32 - 1
"""SO_MAX_PACING_RATE of Linux, and its value for "no rate"."""
BURST_S = 0.1
"""Seconds of limited traffic that may go at once after a pause."""
MIN_PIECE, MAX_PIECE = 1 << 12, 1 << 18
"""Bytes of limited traffic that take their turn at a time."""


class ByteTransport(asyncio.BufferedProtocol):
    """One connected socket. One task may read and one may write at a time.

    Every failure is a `PeerLostError` that names `peer`. Cancelling a read of the small buffer loses nothing.
    Cancelling `read_into` or `write` half-way breaks the transport, since the next frame's start is lost.
    """

    def __init__(self, on_connect: Callable[[ByteTransport], None] | None = None) -> None:
        self.peer = ""
        self.delivery = Delivery(PeerTraffic())
        self._on_connect = on_connect
        self._transport: asyncio.Transport | None = None
        self.lost: str | None = None
        """Reason why the transport is broken, else None. Bytes that arrived before can still be read."""
        self._buffer = bytearray(_SMALL_BUFFER)
        self._start = 0
        self._end = 0
        self._target: memoryview | None = None
        self._reading_paused = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._write_blocked = False
        self._encrypts = False
        self._pace = math.inf
        self._handed_over = 0
        self._mark = 1

    @property
    def remote(self) -> str:
        """The remote end of a TCP connection, as an address without a peer; empty for other sockets."""
        ip, port = self._transport.get_extra_info("peername")[:2] if self._transport is not None else ("", 0)
        return f"/ip{6 if ':' in ip else 4}/{ip}/tcp/{port}" if ip else ""

    @property
    def certificate(self) -> bytes:
        """SHA-256 of the certificate shown at the other end of a TLS connection."""
        shown = None if self._transport is None else self._transport.get_extra_info("ssl_object")
        return hashlib.sha256((shown.getpeercert(binary_form=True) if shown else None) or b"").digest()

    @property
    def socket(self) -> Any:
        """The operating system's socket; None when it is gone."""
        return None if self._transport is None else self._transport.get_extra_info("socket")

    @property
    def pending(self) -> int:
        """Bytes that have arrived and were not read yet."""
        return self._end - self._start

    @property
    def delivered(self) -> int:
        """Bytes that the kernel has taken from us."""
        if self._transport is None or self.lost is not None:
            return self._handed_over
        return self._handed_over - self._transport.get_write_buffer_size()

    def count(self, traffic: PeerTraffic) -> None:
        """Count what arrives from now on, and what was not read yet, as `traffic` of the peer."""
        self.delivery = Delivery(traffic)
        self.delivery.came(self.pending)

    def pace_to(self, rate: float) -> None:
        """Have the kernel send at most `rate` bytes/s, or without limit; a no-op but for TLS on Linux.

        This smooths bursts (`SO_MAX_PACING_RATE`). Unlike `Throttle`, it keeps no account of bytes.
        """
        if rate == self._pace or not self._encrypts or sys.platform != "linux" or self.socket is None:
            return
        self._pace = rate
        with suppress(OSError):  # a kernel without pacing sends as fast as before
            number = _AS_IT_LIKES if math.isinf(rate) else min(max(int(rate), 1), _AS_IT_LIKES - 1)
            self.socket.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("=I", number))

    async def peek(self, size: int) -> bytes:
        """The next `size` bytes, left unread. For frame heads: all of them must fit into the buffer."""
        self._reserve(size)
        while self._end - self._start < size:
            await self._arrival()
        return bytes(memoryview(self._buffer)[self._start : self._start + size])

    async def read(self, size: int) -> bytes:
        """The next `size` bytes. Cancellation consumes nothing."""
        data = await self.peek(size)
        self._start += size
        return data

    async def read_into(self, target: memoryview) -> None:
        """Fill `target` (contiguous bytes). If cancelled half-way, the transport is broken."""
        ready = min(len(target), self._end - self._start)
        target[:ready] = memoryview(self._buffer)[self._start : self._start + ready]
        self._start += ready
        if ready == len(target):
            return
        self._target = target[ready:]
        self._set_mark()
        try:
            while self._target is not None:
                await self._arrival()
        finally:
            if self._target is not None:
                self._target = None
                self.abort("a payload was given up half-way")

    async def write(self, buffers: Sequence[Buffer]) -> None:
        """Hand all bytes to the kernel. If cancelled half-way, the transport is broken."""
        if sum(map(len, buffers)) < _JOIN_BELOW:
            await self._hand_over([b"".join(buffers)])
        elif not self._encrypts:
            await self._hand_over(buffers)
        else:
            try:
                for buffer in buffers:
                    view = memoryview(buffer)
                    for begin in range(0, len(view), _PIECE):
                        await self._hand_over([view[begin : begin + _PIECE]])
            except asyncio.CancelledError:
                self.abort("a message was given up half-way")
                raise

    async def _hand_over(self, buffers: Sequence[Buffer]) -> None:
        """Write `buffers`, and wait until the kernel has them. Raises `PeerLostError` if the peer is lost."""
        if self.lost is not None or self._transport is None:
            raise self._error()
        self._transport.writelines(buffers)
        self._handed_over += sum(map(len, buffers))
        try:
            while self._write_blocked:
                if self.lost is not None:
                    raise self._error()
                self._writer = asyncio.get_running_loop().create_future()
                await self._writer
        finally:
            self._writer = None
            if self._write_blocked:
                self.abort("a message was given up half-way")
        if self.lost is not None:
            raise self._error()

    def close(self) -> None:
        """Let written bytes out, then close. Idempotent."""
        self._break("closed here")
        if self._transport is not None:
            self._transport.close()

    def abort(self, why: str = "closed here") -> None:
        """Close at once and drop what is not written yet. Idempotent."""
        self._break(why)
        if self._transport is not None:
            self._transport.abort()

    # asyncio.BufferedProtocol, called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport does not derive from it
        self._encrypts = transport.get_extra_info("sslcontext") is not None
        # TLS stops at the limit, others above it
        self._transport.set_write_buffer_limits(high=int(self._encrypts))
        if self._on_connect is not None:
            self._on_connect(self)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._target if self._target is not None else memoryview(self._buffer)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self.delivery.came(nbytes)
        if self._target is not None:
            rest = self._target[nbytes:]
            self._target = rest if len(rest) else None
            self._set_mark()
            if self._target is not None:
                return  # the reader is woken once, when its memory is full
        else:
            self._end += nbytes
            self._pause_when_full()
        _wake(self._reader)

    def eof_received(self) -> None:
        self._break("it closed the stream")

    def connection_lost(self, exc: Exception | None) -> None:
        self._break(str(exc) if exc else "it closed the stream")
        self._transport = None  # uvloop's TLS keeps a reference to us: a cycle around 256 KiB
        self._write_blocked = False
        _wake(self._writer)

    def pause_writing(self) -> None:
        self._write_blocked = True

    def resume_writing(self) -> None:
        self._write_blocked = False
        _wake(self._writer)

    # Inside.

    def _reserve(self, size: int) -> None:
        """Make room for `size` unread bytes at the front of the buffer."""
        if self._start + size <= len(self._buffer):
            return
        unread = bytes(memoryview(self._buffer)[self._start : self._end])
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        self._buffer[: len(unread)] = unread
        self._start, self._end = 0, len(unread)

    async def _arrival(self) -> None:
        """Wait until bytes have arrived."""
        if self.lost is not None or self._transport is None:
            raise self._error()
        if self._start == self._end:
            self._start = self._end = 0
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _set_mark(self) -> None:
        """Ask the kernel to wake us for a whole batch (`SO_RCVLOWAT`) while a batch is sure to come."""
        rest = 0 if self._target is None else len(self._target)
        mark = _BATCH if rest >= _BATCH + _RECORD else 1
        if mark == self._mark or not self._encrypts or sys.platform != "linux" or self.socket is None:
            return
        self._mark = mark
        with suppress(OSError):  # without it we are woken for each packet
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)

    def _pause_when_full(self) -> None:
        if self._end == len(self._buffer) and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def _break(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
        _wake(self._reader)
        _wake(self._writer)

    def _error(self) -> PeerLostError:
        return PeerLostError(self.peer, self.lost or "not connected")


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class TokenBucket:
    """A limit in bytes/s for one direction, kept as the time at which the direction is free again. Pure.

    An infinite rate limits nothing. Times are seconds of one clock that never goes back. Example:

        bucket = TokenBucket(rate=1e6)
        bucket.spend(250_000, now=0.0)  # 0.0: it may go at once
        bucket.spend(1, now=0.0)  # 0.15: seconds to wait, less a burst of 0.1 s
    """

    def __init__(self, rate: float = math.inf) -> None:
        self.rate = rate
        """Bytes/s."""
        self._free_at = -math.inf

    def change(self, rate: float, now: float) -> None:
        """Set another rate in bytes/s from now on; bytes that are owed stay owed."""
        owed = max(self._free_at - now, 0.0) * self.rate if math.isfinite(self.rate) else 0.0
        self.rate = rate
        self._free_at = now + owed / rate

    def spend(self, nbytes: int, now: float) -> float:
        """Count `nbytes`, in the order of asking. Returns the seconds to wait before they may go."""
        start = max(self._free_at, now - BURST_S)
        self._free_at = start + nbytes / self.rate
        return max(start - now, 0.0)


class ThrottledDirection:
    """Limit and byte count of one direction, since the start of the node."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.unlimited = True
        self._bucket = TokenBucket()

    def limit(self, rate: float) -> None:
        """Set the limit in bytes/s, also for transfers under way; infinite: none."""
        self.unlimited = math.isinf(rate)
        self._bucket.change(rate, _now())

    def passed(self, nbytes: int) -> None:
        """Count bytes that do not wait; later ones wait for them."""
        self.nbytes += nbytes
        self._bucket.spend(nbytes, _now())

    async def turn(self, nbytes: int) -> None:
        """Wait until `nbytes` may go."""
        self.nbytes += nbytes
        wait_s = self._bucket.spend(nbytes, _now())
        if wait_s:
            await asyncio.sleep(wait_s)

    def pieces(self, view: memoryview) -> Iterator[memoryview]:
        """Parts of `view` that each take their turn, sized for the rate at that time."""
        while len(view):
            share = int(min(self._bucket.rate * BURST_S, MAX_PIECE))
            size = max(MIN_PIECE, share)
            yield view[:size]
            view = view[size:]


class Throttle:
    """Both directions of one node, for all its streams together."""

    def __init__(self) -> None:
        self.up = ThrottledDirection()
        self.down = ThrottledDirection()


def _now() -> float:
    return asyncio.get_running_loop().time()
