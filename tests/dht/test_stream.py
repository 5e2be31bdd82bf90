"""Streams over a socket pair: everything but p2pd.

Cancellation at each awkward point, and peers that misbehave.
"""

from __future__ import annotations

import asyncio
import errno
import math
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.base.errors import PeerLostError, ProtocolError
from hetpeer.dht.base.file_pieces import InMemory
from hetpeer.dht.streams.byte_transport import ByteTransport, Throttle
from hetpeer.dht.streams.frame import PREFIX, encode_head
from hetpeer.dht.streams.stream import FILE_PIECE, Stream
from tests.amounts import examples

BIG = 8 << 20
"""More than any socket buffer holds."""
LONGEST_S = 60.0


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Stream, Stream]]:
    """Two ends of one stream, as between a program and p2pd, for LONGEST_S at most."""
    ends = []
    for end in socket.socketpair(socket.AF_UNIX):
        _, wire = await asyncio.get_running_loop().create_unix_connection(ByteTransport, sock=end)
        ends.append(Stream(wire, peer_id=f"peer-{len(ends)}", protocol="test/1"))
    try:
        async with asyncio.timeout(LONGEST_S):
            yield ends[0], ends[1]
    finally:
        for stream in ends:
            stream.abort()


@asynccontextmanager
async def raw() -> AsyncIterator[tuple[Stream, socket.socket]]:
    """A stream and the bare socket at its other end, for LONGEST_S at most."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    theirs.setblocking(False)
    _, wire = await asyncio.get_running_loop().create_unix_connection(ByteTransport, sock=ours)
    stream = Stream(wire, peer_id="raw", protocol="test/1")
    try:
        async with asyncio.timeout(LONGEST_S):
            yield stream, theirs
    finally:
        stream.abort()
        theirs.close()


async def stalled(task: asyncio.Task[None]) -> None:
    """Return once `task` has run into its wait."""
    await asyncio.wait({task}, timeout=0.05)
    assert not task.done()


@given(sizes=st.lists(st.integers(0, 300_000), min_size=1, max_size=6), header_size=st.integers(0, 60_000))
@examples(25)
def test_frames_of_any_size_arrive_whole_and_in_order(sizes: list[int], header_size: int) -> None:
    async def exchange() -> None:
        async with linked() as (a, b):
            payloads = [bytes([n]) * size for n, size in enumerate(sizes)]

            async def send() -> None:
                for n, payload in enumerate(payloads):
                    await a.send(
                        {"n": n, "pad": bytes(header_size)},
                        payload[: len(payload) // 3],
                        payload[len(payload) // 3 :],
                    )

            async with asyncio.TaskGroup() as group:
                group.create_task(send())
                for n, payload in enumerate(payloads):
                    frame = await b.receive()
                    assert (frame.header["n"], frame.payload_length) == (n, len(payload))
                    if n % 3 == 2:
                        await b.skip()
                    else:
                        assert await b.receive_bytes(len(payload)) == payload

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(exchange())


async def test_a_payload_lands_in_the_callers_memory_in_both_directions() -> None:
    async with linked() as (a, b):
        for one, other in ((a, b), (b, a)):
            payload = bytes(range(256)) * (BIG // 256)
            target = bytearray(BIG)
            async with asyncio.TaskGroup() as group:
                group.create_task(one.send({}, memoryview(payload)))
                await other.receive()
                await other.receive_into(target)
            assert target == payload


async def test_send_waits_for_a_slow_reader_and_frees_its_buffers_on_return() -> None:
    async with linked() as (a, b):
        payload = bytearray(b"x" * BIG)
        sending = asyncio.create_task(a.send({}, payload))
        await b.receive()
        await stalled(sending)

        async def overwrite_when_sent() -> None:
            await sending
            payload[:] = bytes(BIG)

        overwriting = asyncio.create_task(overwrite_when_sent())
        assert await b.receive_bytes(BIG) == b"x" * BIG
        await overwriting


async def test_senders_in_parallel_do_not_mix_their_frames() -> None:
    async with linked() as (a, b), asyncio.TaskGroup() as group:
        for n in range(8):
            group.create_task(a.send({"n": n}, bytes([n]) * 300_000))
        for _ in range(8):
            frame = await b.receive()
            assert set(await b.receive_bytes(300_000)) == {frame.header["n"]}


async def test_a_cancelled_receive_loses_nothing() -> None:
    async with raw() as (stream, peer):
        head = encode_head({"a": 1}, 0)
        for cut in (0, 5, PREFIX.size, len(head) - 1):
            peer.send(head[:cut])
            receiving = asyncio.create_task(stream.receive())
            await stalled(receiving)
            receiving.cancel()
            peer.send(head[cut:])
            assert (await stream.receive()).header == {"a": 1}


async def test_a_payload_given_up_half_way_breaks_the_stream() -> None:
    async with raw() as (stream, peer):
        peer.send(encode_head({}, 100) + b"only a part")
        await stream.receive()
        receiving = asyncio.create_task(stream.receive_into(bytearray(100)))
        await stalled(receiving)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert stream.broken


async def test_a_frame_given_up_half_way_breaks_the_stream() -> None:
    async with linked() as (a, b):
        sending = asyncio.create_task(a.send({}, bytes(BIG)))
        await stalled(sending)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(PeerLostError):
            await a.send({})
        await b.receive()
        with pytest.raises(PeerLostError):
            await b.receive_bytes(BIG)


async def test_a_sender_cancelled_before_its_turn_sends_nothing() -> None:
    async with linked() as (a, b):
        first = asyncio.create_task(a.send({"n": 1}, bytes(BIG)))
        await stalled(first)
        second = asyncio.create_task(a.send({"n": 2}))
        await stalled(second)
        second.cancel()
        third = asyncio.create_task(a.send({"n": 3}))
        await b.receive()
        await b.skip()
        assert (await b.receive()).header == {"n": 3}
        await asyncio.gather(first, third)


async def test_a_dripping_peer_is_cut_off_in_time() -> None:
    async with raw() as (stream, peer):

        async def drip() -> None:
            for byte in encode_head({"a": "b" * 1000}, 0):
                peer.send(bytes([byte]))
                await asyncio.sleep(0.05)  # it takes 50 s

        dripping = asyncio.create_task(drip())
        before = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            await stream.receive(timeout_s=0.2)
        assert time.monotonic() - before < 10
        assert caught.value.peer == "raw"
        assert stream.broken
        dripping.cancel()


async def test_a_peer_that_takes_nothing_is_cut_off_in_time() -> None:
    async with raw() as (stream, _):
        with pytest.raises(PeerLostError):
            await stream.send({}, bytes(BIG), timeout_s=0.2)
        assert stream.broken


async def test_an_announced_giant_costs_no_memory() -> None:
    async with raw() as (stream, peer):
        peer.send(encode_head({}, 2**62))
        with pytest.raises(ProtocolError) as caught:
            await stream.receive(payload_limit=1000)
        assert caught.value.peer == "raw"
        assert stream.broken


async def test_a_payload_of_another_length_than_due_is_refused() -> None:
    async with linked() as (a, b):
        await a.send({}, b"123")
        await b.receive()
        with pytest.raises(ProtocolError):
            await b.receive_into(bytearray(4))
    async with linked() as (a, b):
        await a.send({}, b"123")
        await b.receive()
        with pytest.raises(ProtocolError):
            await b.receive_bytes(2)


async def take_all(stream: Stream) -> None:
    while True:
        await stream.receive(payload_limit=100)
        await stream.skip()


@given(st.binary(min_size=1, max_size=300))
@examples(50)
def test_any_bytes_end_in_a_protocol_error_or_a_lost_peer(junk: bytes) -> None:
    async def feed() -> None:
        async with raw() as (stream, peer):
            peer.send(junk)
            peer.close()
            with pytest.raises((ProtocolError, PeerLostError)):
                await take_all(stream)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(feed())


async def test_what_was_sent_before_a_close_still_arrives() -> None:
    async with linked() as (a, b):
        await a.send({"last": True}, b"words")
        a.close()
        await asyncio.sleep(0.05)
        assert (await b.receive()).header == {"last": True}
        assert await b.receive_bytes(5) == b"words"
        with pytest.raises(PeerLostError) as caught:
            await b.receive()
        assert caught.value.why == "it closed the stream"


async def test_a_peer_that_vanishes_wakes_sender_and_receiver() -> None:
    async with raw() as (stream, peer):
        sending = asyncio.create_task(stream.send({}, bytes(BIG)))
        receiving = asyncio.create_task(stream.receive())
        await stalled(sending)
        peer.close()
        for task in (sending, receiving):
            with pytest.raises(PeerLostError):
                await task


async def test_the_next_frame_is_not_read_before_the_payload_is_taken() -> None:
    async with linked() as (a, b):
        await a.send({}, b"123")
        await b.receive()
        with pytest.raises(RuntimeError, match="not taken"):
            await b.receive()


class Failing(InMemory):
    """A file that cannot be read from byte `good` on."""

    def __init__(self, data: bytes, good: int) -> None:
        super().__init__(data)
        self._good = good

    def read_into(self, begin: int, target: memoryview) -> None:
        if begin + len(target) > self._good:
            raise OSError(errno.EIO, "the disk is broken")
        super().read_into(begin, target)


async def received(stream: Stream, broken_at: int | None = None) -> bytes:
    """The next payload, taken piece by piece; taking one fails from byte `broken_at` on."""
    found = bytearray()

    async def take(begin: int, piece: memoryview) -> None:
        assert begin == len(found)
        assert len(piece) <= FILE_PIECE
        if broken_at is not None and begin >= broken_at:
            raise OSError(errno.ENOSPC, "the disk is full")
        found.extend(piece)

    await stream.receive()
    await stream.receive_pieces(take)
    return bytes(found)


CONTENT = random.Random(0).randbytes(2 * FILE_PIECE + 12_345)


@pytest.mark.parametrize("rate", [math.inf, 20e6])
@pytest.mark.parametrize("nbytes", [0, 1, FILE_PIECE, len(CONTENT)])
async def test_a_file_goes_and_comes_in_pieces_between_other_frames(rate: float, nbytes: int) -> None:
    data = CONTENT[:nbytes]
    async with linked() as (a, b):
        for end in (a, b):
            throttle = Throttle()
            throttle.up.limit(rate)
            throttle.down.limit(rate)
            end.throttle(throttle)
        sending = asyncio.create_task(a.send_file({"n": 1}, InMemory(data)))
        assert await received(b) == data
        await sending
        await a.send({"n": 2}, b"after")
        assert (await b.receive()).header == {"n": 2}
        assert await b.receive_bytes(10) == b"after"


async def test_a_file_that_cannot_be_read_on_breaks_the_stream() -> None:
    async with linked() as (a, b):
        sending = asyncio.create_task(a.send_file({}, Failing(CONTENT, FILE_PIECE)))
        with pytest.raises(PeerLostError):
            await received(b)
        with pytest.raises(OSError, match="broken"):
            await sending
        assert a.broken


async def test_who_cannot_keep_a_piece_breaks_the_stream() -> None:
    async with linked() as (a, b):
        sending = asyncio.create_task(a.send_file({}, InMemory(bytes(BIG))))
        with pytest.raises(OSError, match="full"):
            await received(b, broken_at=FILE_PIECE)
        assert b.broken
        with pytest.raises(PeerLostError):
            await sending


async def test_a_file_that_is_given_up_half_way_breaks_the_stream() -> None:
    async with linked() as (a, b):
        sending = asyncio.create_task(a.send_file({}, InMemory(bytes(BIG))))
        await b.receive()
        await stalled(sending)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert a.broken
