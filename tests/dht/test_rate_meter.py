"""A line's rate is found from frames as they pass, whatever clocks say and however they are sent."""

import random

import pytest

from hetpeer.dht.streams.rate_meter import GROUP_BYTES, RateMeter

KIB = 1 << 10


class Line:
    """First come, first served, at `rate` bytes/s, after `delay_s`; the sender's clock is hours away from
    the receiver's.
    """

    def __init__(self, rate, delay_s=0.05, skew=7200.0):
        self.meter = RateMeter()
        self.rate, self._delay, self._skew = rate, delay_s, skew
        self._free = 0.0

    def send(self, at, nbytes, late_s=0.0):
        """Returns when it is whole; `late_s`: the receiver notices later."""
        self._free = max(at, self._free) + nbytes / self.rate
        self.meter.arrived(at + self._skew, self._free + self._delay + late_s, nbytes)
        return self._free


@pytest.mark.parametrize("nbytes", [8 * KIB, 256 * KIB, 4096 * KIB])
@pytest.mark.parametrize("rate", [1e5, 2.5e6, 1e8])
def test_frames_one_at_a_time_with_pauses(rate, nbytes):
    line, now = Line(rate), 0.0
    for _ in range(max(40, 10 * GROUP_BYTES // nbytes)):
        line.send(now, 0)
        now = line.send(now + 0.01, nbytes) + 0.3
    assert line.meter.rate == pytest.approx(rate, rel=0.01)


def test_a_line_that_is_never_idle():
    line = Line(1e6)
    line.send(0.0, 0)
    for number in range(200):
        line.send(number * 0.001, 32 * KIB)  # much faster than the line takes them
    assert line.meter.rate == pytest.approx(1e6, rel=0.01)


@pytest.mark.parametrize("pause_s", [0.0, 0.5])
def test_streams_that_share_the_line(pause_s):
    """Three frames at a time, a packet of each in turn, so that all are whole at almost the same time."""
    meter, rate, nbytes, delay_s, now = RateMeter(), 2e6, 512 * KIB, 0.2, 10.0
    for _ in range(60):
        meter.arrived(now, now + delay_s, 0)
        whole = now + 3 * nbytes / rate
        for lane in range(3):
            meter.arrived(now + 0.01 * lane, whole + delay_s + 0.001 * lane, nbytes)
        now = whole + pause_s
    assert meter.rate == pytest.approx(rate, rel=0.15)


def test_a_first_guess_comes_soon():
    line = Line(2e6)
    line.send(0.0, 0)
    for _ in range(6):
        line.send(0.0, 1024 * KIB)
    assert line.meter.rate == pytest.approx(2e6, rel=0.01)


@pytest.mark.parametrize("apart_s", [0.0, 0.3])
def test_bundles_of_one_size_before_any_empty_frame(apart_s):
    """Two bundles at a time: the second waits for the first, unless it leaves later.

    Then nothing tells what the line takes, until a frame without payload has met it idle.
    """
    line, now = Line(62.5e3), 0.0
    for _ in range(12):
        first = line.send(now, 12 * KIB)
        now = line.send(max(now, apart_s and first + apart_s), 12 * KIB) + 0.4
    if not apart_s:
        assert line.meter.rate == pytest.approx(62.5e3, rel=0.01)
    else:
        assert line.meter.rate == 0.0
    line.send(now, 0)
    for _ in range(40):
        now = line.send(now, 12 * KIB) + 0.4
    assert line.meter.rate == pytest.approx(62.5e3, rel=0.01)


def test_a_slow_line_is_known_after_a_few_bundles():
    line = Line(62.5e3)
    for number in range(5):
        line.send(0.01 * number, 12 * KIB)
    assert line.meter.rate == pytest.approx(62.5e3, rel=0.01)


def test_a_pause_of_the_receiver_is_no_slow_line():
    line, now = Line(1e8), 0.0
    for late_s in (0.0, 0.6):
        line.send(now, 0)
        now = line.send(now, 2 * KIB, late_s) + 1.0
    assert line.meter.rate == 0.0


def test_what_a_bundle_has_more_than_the_fastest_is_timed():
    line, now = Line(62.5e3), 0.0
    for nbytes in (12 * KIB, 36 * KIB) * 12:
        now = line.send(now, nbytes) + 0.4
    assert line.meter.rate == pytest.approx(62.5e3, rel=0.01)


def test_it_follows_the_line():
    line, now = Line(8e6), 0.0
    for rate in (8e6, 1e6, 4e6):
        line.rate = rate
        for _ in range(120):
            line.send(now, 0)
            now = line.send(now, 16 * KIB) + 0.05
        assert line.meter.rate == pytest.approx(rate, rel=0.01)


def test_a_busy_receiver_does_not_make_a_fast_line_slow():
    """A fifth of the frames are noticed late, by up to 50 ms."""
    line, now, draw = Line(1e8), 0.0, random.Random(1)
    for _ in range(400):
        line.send(now, 0)
        late = draw.random() * 0.05 if draw.random() < 0.2 else 0.0
        now = line.send(now, 64 * KIB, late) + 0.1
    assert line.meter.rate > 2e7


def test_an_old_least_delay_is_forgotten():
    """The route became longer by a second: soon that is no load any more."""
    line, now = Line(1e6), 0.0
    for delay in (0.05, 1.05):
        line._delay = delay
        for _ in range(700):
            line.send(now, 0)
            now = line.send(now, 32 * KIB) + 0.2
    assert line.meter.rate == pytest.approx(1e6, rel=0.01)


def test_nothing_is_known_before_enough_has_passed():
    line = Line(1e6)
    line.send(line.send(0.0, GROUP_BYTES - 1) + 1.0, 1)
    assert line.meter.rate == 0.0


def test_bytes_over_no_time_are_no_rate():
    """As on loopback: every frame is here at once. Such a line was shown as one of 524,288,000 Mbit/s."""
    line, now = Line(float("inf")), 0.0
    for _ in range(400):
        line.send(now, 0)
        now = line.send(now, 64 * KIB) + 0.01
    assert line.meter.rate == 0.0


def test_one_late_frame_after_many_that_took_no_time_is_no_rate():
    line, now = Line(float("inf")), 0.0
    for late_s in (*[0.0] * 400, 0.006):
        line.send(now, 0)
        now = line.send(now, 64 * KIB, late_s) + 0.01
    assert line.meter.rate <= 64 * KIB / 0.006 * 1.01, "the bytes of the others had no time of their own"


def test_a_rate_has_enough_bytes_and_time_behind_it():
    """Bytes enough, and the line never idle, but in less time than wake-ups differ by."""
    line = Line(1e9)
    line.send(0.0, 0)
    for sent in range(40):
        line.send(0.0, 16 * KIB)
        assert sent >= 30 or line.meter.rate == 0.0, "half a millisecond is 30.5 frames"
    assert line.meter.rate == pytest.approx(1e9, rel=0.01)
