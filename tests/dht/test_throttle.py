"""A limit holds over any time, for all streams together: by arithmetic, and by real streams over socket
pairs.
"""

import asyncio
import itertools
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.base.errors import PeerLostError
from hetpeer.dht.streams.byte_transport import (
    BURST_S,
    MAX_PIECE,
    MIN_PIECE,
    Throttle,
    ThrottledDirection,
    TokenBucket,
)
from hetpeer.dht.streams.stream import Stream
from tests.dht.test_stream import linked

RATE = 400_000.0
PAYLOAD = bytes(range(256)) * 400


async def taken(stream: Stream) -> bytes:
    await stream.receive()
    return bytes(await stream.receive_bytes(1 << 20))


async def test_a_limit_on_sending_is_of_all_streams() -> None:
    throttle = Throttle()
    throttle.up.limit(RATE)
    async with linked() as one, linked() as other:
        for ours, _ in (one, other):
            ours.throttle(throttle)
        began = time.monotonic()
        sending = [ours.send({"n": 1}, PAYLOAD) for ours, _ in (one, other)]
        *_, first, second = await asyncio.gather(*sending, taken(one[1]), taken(other[1]))
        passed = time.monotonic() - began
    assert first == second == PAYLOAD
    assert 2 * len(PAYLOAD) / RATE - 0.2 < passed
    assert throttle.up.nbytes >= 2 * len(PAYLOAD)


async def test_a_limit_on_receiving_is_felt_by_who_sends() -> None:
    throttle = Throttle()
    throttle.down.limit(RATE)
    async with linked() as (ours, theirs):
        ours.throttle(throttle)
        began = time.monotonic()
        _, got = await asyncio.gather(theirs.send({}, PAYLOAD * 4), taken(ours))
        passed = time.monotonic() - began
    assert got == PAYLOAD * 4
    assert passed > len(got) / RATE - 0.2
    assert throttle.down.nbytes >= len(got)


async def test_a_message_does_not_wait_for_payloads_of_others() -> None:
    throttle = Throttle()
    throttle.up.limit(2_000.0)
    async with linked() as one, linked() as other:
        for ours, _ in (one, other):
            ours.throttle(throttle)
        bulk = asyncio.create_task(one[0].send({}, PAYLOAD))  # 51 s of it
        await one[1].receive()
        await asyncio.wait_for(other[0].send({"lease": 1}), 20.0)
        assert (await other[1].receive()).header == {"lease": 1}
        assert not bulk.done()
        bulk.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bulk
        assert one[0].broken, "nobody could find the next frame"


async def test_a_limit_that_is_lifted_lets_go_what_is_under_way() -> None:
    throttle = Throttle()
    throttle.up.limit(3_200.0)
    async with linked() as (ours, theirs):
        ours.throttle(throttle)
        bulk = asyncio.create_task(ours.send({}, PAYLOAD * 10))  # 320 s of it
        await theirs.receive()
        throttle.up.limit(float("inf"))
        assert len(await theirs.receive_bytes(1 << 21)) == len(PAYLOAD) * 10
        await bulk


async def test_a_payload_given_up_half_way_breaks_the_stream() -> None:
    throttle = Throttle()
    throttle.down.limit(32_000.0)
    async with linked() as (ours, theirs):
        ours.throttle(throttle)
        sending = asyncio.create_task(theirs.send({}, PAYLOAD))
        await ours.receive()
        with pytest.raises(PeerLostError):
            await ours.receive_bytes(1 << 20, timeout_s=0.3)
        assert ours.broken
        await asyncio.gather(sending, return_exceptions=True)


@pytest.mark.parametrize("rate", [32_000.0, 1e6, 1e12])
async def test_pieces_are_all_of_it(rate: float) -> None:
    way = ThrottledDirection()
    way.limit(rate)
    pieces = [*way.pieces(memoryview(PAYLOAD))]
    assert b"".join(pieces) == PAYLOAD
    assert all(MIN_PIECE <= len(piece) <= MAX_PIECE for piece in pieces[:-1])
    assert len({len(piece) for piece, _ in itertools.pairwise(pieces)}) <= 1


BUCKET_RATE = 1000.0
PIECE = 200


@given(asked=st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, PIECE)), min_size=1, max_size=80))
def test_no_stretch_of_time_has_more_than_the_rate(asked: list[tuple[float, int]]) -> None:
    bucket, now, gone = TokenBucket(BUCKET_RATE), 0.0, []
    for pause, nbytes in asked:
        now += pause
        gone.append((now + bucket.spend(nbytes, now), nbytes))
    assert [at for at, _ in gone] == sorted(at for at, _ in gone)
    for first, (begin, _) in enumerate(gone):
        total = 0
        for at, nbytes in gone[first:]:
            total += nbytes
            assert total <= BUCKET_RATE * (at - begin + BURST_S) + PIECE + 1e-6


def test_who_always_asks_gets_the_whole_rate() -> None:
    bucket, now = TokenBucket(BUCKET_RATE), 5.0
    for _ in range(100):
        now += bucket.spend(100, now)
    assert now == pytest.approx(5.0 + 100 * 100 / BUCKET_RATE, abs=0.2 + BURST_S)


def test_without_a_limit_nothing_waits_or_is_owed() -> None:
    bucket = TokenBucket()
    assert [bucket.spend(1 << 40, 1.0) for _ in range(3)] == [0.0] * 3
    bucket.change(BUCKET_RATE, 2.0)
    assert bucket.spend(1, 2.0) == 0.0


@given(rate=st.floats(1.0, 1e9))
def test_what_is_owed_is_owed_in_bytes(rate: float) -> None:
    bucket = TokenBucket(BUCKET_RATE)
    bucket.spend(500, 10.0)
    bucket.spend(0, 10.0)
    owed = bucket.spend(0, 10.0) * BUCKET_RATE
    bucket.change(rate, 10.0)
    assert bucket.spend(0, 10.0) * rate == pytest.approx(owed)
    bucket.change(math.inf, 10.0)
    assert bucket.spend(1000, 10.0) == 0.0
