"""A rate holds over any time, whatever is asked for and however often it changes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.streams.byte_transport import BURST_S, TokenBucket

RATE = 1000.0
PIECE = 200


@given(asked=st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, PIECE)), min_size=1, max_size=80))
def test_no_stretch_of_time_has_more_than_the_rate(asked: list[tuple[float, int]]) -> None:
    bucket, now, gone = TokenBucket(RATE), 0.0, []
    for pause, nbytes in asked:
        now += pause
        gone.append((now + bucket.spend(nbytes, now), nbytes))
    assert [at for at, _ in gone] == sorted(at for at, _ in gone)
    for first, (begin, _) in enumerate(gone):
        total = 0
        for at, nbytes in gone[first:]:
            total += nbytes
            assert total <= RATE * (at - begin + BURST_S) + PIECE + 1e-6


def test_who_always_asks_gets_the_whole_rate() -> None:
    bucket, now = TokenBucket(RATE), 5.0
    for _ in range(100):
        now += bucket.spend(100, now)
    assert now == pytest.approx(5.0 + 100 * 100 / RATE, abs=0.2 + BURST_S)


def test_without_a_limit_nothing_waits_or_is_owed() -> None:
    bucket = TokenBucket()
    assert [bucket.spend(1 << 40, 1.0) for _ in range(3)] == [0.0] * 3
    bucket.change(RATE, 2.0)
    assert bucket.spend(1, 2.0) == 0.0


@given(rate=st.floats(1.0, 1e9))
def test_what_is_owed_is_owed_in_bytes(rate: float) -> None:
    bucket = TokenBucket(RATE)
    bucket.spend(500, 10.0)
    bucket.spend(0, 10.0)
    owed = bucket.spend(0, 10.0) * RATE
    bucket.change(rate, 10.0)
    assert bucket.spend(0, 10.0) * rate == pytest.approx(owed)
    bucket.change(math.inf, 10.0)
    assert bucket.spend(1000, 10.0) == 0.0
