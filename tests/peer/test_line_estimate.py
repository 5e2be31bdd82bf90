"""The rate of a line from when bytes arrive: in a simulated network of any rates and round trips."""

import heapq
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetpeer.peer.probing.line_estimate import LEAST_S, OneWay, line_rate

MBIT = 125e3
NBYTES, LIMIT_S = 1 << 21, 1.1


def probed(rate, trips, far=(), jitter_s=0.0, nbytes=NBYTES, seed=0):
    """A probe over a line of `rate` bytes/s to peers with these round trips (s) and lines of their own
    (`far`; the rest have fast ones). Returns it, and for how long the line was busy (s).

    Each line is first come, first served; what arrives is noticed up to `jitter_s` late.
    """
    draw = random.Random(seed)
    names = [f"p{i}" for i in range(len(trips))]
    ends = dict.fromkeys(names, 0.0)
    far = dict(zip(names, [*far, *[1e9] * len(trips)], strict=False))
    way, events, free, now = OneWay(dict(zip(names, trips, strict=True)), nbytes, LIMIT_S), [], 0.0, 0.0
    while not way.over(now):
        for name, trip in zip(names, trips, strict=True):
            while size := way.piece(name, now):
                way.sent(name, size)
                free = max(free, now) + size / rate
                ends[name] = max(ends[name], free) + size / far[name]
                late = draw.random() * jitter_s
                heapq.heappush(events, (ends[name] + trip + late, name, size))
        if not events:
            break
        now, name, size = heapq.heappop(events)
        if now < LIMIT_S:
            way.arrived(name, size, now)
    return way, free


@given(
    rate=st.floats(1 * MBIT, 200 * MBIT),
    trips=st.lists(st.floats(0.002, 0.08), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
@settings(max_examples=120, deadline=None)
def test_a_line_of_any_rate_is_found(rate, trips, seed):
    assume(rate * max(trips) < NBYTES / 8)  # or most of it is slow start, as below
    way, busy_s = probed(rate, trips, jitter_s=0.001, seed=seed)
    found = way.measured()
    # a slow line takes a few pieces in that time, and they come over ways of different length
    assert found.rate == pytest.approx(rate, rel=0.15 if rate > 4 * MBIT else 0.25)
    assert found.error < 0.5
    assert way.nbytes <= NBYTES
    assert busy_s < 2.5 * LIMIT_S, "a slow line is free again soon"


@given(rate=st.floats(5 * MBIT, 100 * MBIT), trip=st.floats(0.1, 0.4))
@settings(max_examples=60, deadline=None)
def test_far_peers_show_no_more_than_there_is_and_an_error_that_tells(rate, trip):
    """Slow start over long ways takes more bytes than a probe has: too little is found, with a large
    error.
    """
    found = probed(rate, [trip])[0].measured()
    assert found.rate <= rate * 1.1
    if found.rate < 0.7 * rate:
        assert not found.rate or found.error > 0.1


@pytest.mark.parametrize("rate", [20 * MBIT, 100 * MBIT])
def test_peers_on_slow_lines_do_not_make_ours_slow(rate):
    """Two of four take 5 Mbit/s each: the others take the rest."""
    way, _ = probed(rate, [0.02, 0.03, 0.01, 0.04], far=[5 * MBIT, 5 * MBIT])
    assert way.measured().rate == pytest.approx(rate, rel=0.15)


def test_slow_peers_alone_show_what_they_take_together():
    way, _ = probed(100 * MBIT, [0.02, 0.03], far=[5 * MBIT, 10 * MBIT])
    assert way.measured().rate == pytest.approx(15 * MBIT, rel=0.15)


def test_a_very_slow_line_is_known_from_the_time_alone():
    """256 kbit/s: the least that an owner may allow."""
    way, _ = probed(0.256 * MBIT, [0.05])
    assert way.measured().rate == pytest.approx(0.256 * MBIT, rel=0.2)
    assert way.nbytes < 40_000


@pytest.mark.parametrize(
    "arrivals",
    [
        [],
        [(1.0, 1 << 20)],
        [(1.0, 1 << 20), (1.0, 1 << 20)],
        [(1.0, 1 << 20), (1.0 + LEAST_S / 2, 1 << 20)],
        [(1.0, 1000), (1.1, 1000), (1.2, 1000)],
    ],
)
def test_too_few_bytes_or_too_little_time_are_no_rate(arrivals):
    assert line_rate(arrivals).rate == 0.0


def test_slow_start_is_left_out():
    """A MiB at 1 MB/s, then three at 10 MB/s."""
    slow = [(0.01 * n, 10_000) for n in range(100)]
    fast = [(1.0 + 0.001 * n, 10_000) for n in range(300)]
    found = line_rate(slow + fast)
    assert found.rate == pytest.approx(1e7, rel=0.01)
    assert line_rate(slow).error < 0.02
    assert line_rate(slow + fast[:50]).error > 0.2, "it was still rising"
    assert line_rate(slow + fast[:50], trip_s=0.3).rate == 0.0, "and will for long over such a way"
    rising = [(0.3 * n / (n + 20), 10_000) for n in range(20)]
    assert line_rate([(0.3 - at, nbytes) for at, nbytes in rising]).error > 0.1, "so it was here, a little"


@pytest.mark.parametrize("pause_at", [0.3, 0.5, 0.7, 0.78, 0.9])
def test_a_pause_of_the_processor_makes_no_line_faster(pause_at):
    """100 Mbit/s for 160 ms; nothing is noticed for 40 ms, and then all that has come meanwhile."""
    at = [0.0016 * n for n in range(100)]
    begin = 0.16 * pause_at - 0.04
    noticed = [begin + 0.04 if begin < when < begin + 0.04 else when for when in at]
    assert line_rate([(when, 20_000) for when in noticed]).rate <= 1.15 * 100 * MBIT


def test_what_is_lost_is_not_waited_for_and_lies_about_bytes_do_not_count():
    way = OneWay({"a": 0.01, "b": 0.01}, nbytes=1 << 16, end=1.0)
    size = way.piece("a", 0.0)
    way.sent("a", size)
    way.arrived("a", 10 * size, 0.1)
    way.arrived("stranger", size, 0.1)
    assert way.nbytes == size
    way.sent("b", size)
    way.lost("a")
    way.lost("b")
    assert way.over(0.2)
    assert way.piece("a", 0.2) == 0
