"""What an uplink carries, and which link may use how much of it while we reduce."""

import math

import pytest

from hetpeer.peer.transport.uplink import AIR, ARRIVALS, KNOWN, PACED_BELOW, WINDOWS, UplinkRate, UplinkShares

MB = 1e6


TRIP_S = 0.04


def windows(outflow, rates, links=2, arrived=0, now=0.0, every_s=0.1, under_way_s=1.0):
    """`ARRIVALS` acknowledgements at each of `rates`, in bytes/s, of bytes that are under way for so long."""
    outflow.look(now, 0, arrived, 0, TRIP_S)
    outflow.look(now, links, arrived, 1, TRIP_S)
    outflow.look(now, links, arrived + 1, round(rates[0] * under_way_s), TRIP_S)  # it begins to flow
    for rate in rates:
        for _ in range(ARRIVALS):
            now, arrived = now + every_s, arrived + round(rate * every_s)
            outflow.look(now, links, arrived, round(rate * under_way_s), TRIP_S)
    return now, arrived


def test_an_uplink_carries_what_it_carried_at_its_best():
    outflow = UplinkRate()
    now, arrived = windows(outflow, [MB, 2 * MB, 12 * MB, 11 * MB, 12 * MB, 3 * MB, 4 * MB, 12.1 * MB])
    assert outflow.rate == pytest.approx(12 * MB)
    windows(outflow, [5 * MB] * WINDOWS, arrived=arrived, now=now)
    assert outflow.rate == pytest.approx(5 * MB), "a line that has become slower is found out"


def test_one_link_says_nothing_of_the_uplink():
    outflow = UplinkRate()
    now, arrived = windows(outflow, [9 * MB] * 3, links=1)
    assert outflow.rate == 0
    windows(outflow, [2 * MB] * KNOWN, arrived=arrived, now=now)
    assert outflow.rate == pytest.approx(2 * MB)


def test_time_in_which_nothing_is_under_way_does_not_count_nor_that_until_something_arrives():
    outflow = UplinkRate()
    arrived = 0
    for burst in range(ARRIVALS * KNOWN):
        now = 100.0 * burst
        outflow.look(now, 2, arrived, 3000, TRIP_S)
        arrived += 1000
        outflow.look(now + TRIP_S, 2, arrived, 2000, TRIP_S)
        arrived += 1000
        outflow.look(now + TRIP_S + 0.4, 2, arrived, 1000, TRIP_S)
        arrived += 1000
        outflow.look(now + TRIP_S + 0.8, 0, arrived, 0, TRIP_S)
    assert outflow.rate == pytest.approx(2500)


def test_frames_that_only_travel_say_nothing_of_the_uplink():
    """A few small ones that are always under way: acknowledged after a trip, with the next frame that
    comes back.
    """
    outflow = UplinkRate()
    now, arrived = windows(outflow, [MB] * WINDOWS, under_way_s=TRIP_S + 0.08)
    assert outflow.rate == outflow.seen == 0
    windows(outflow, [9 * MB] * KNOWN, arrived=arrived, now=now)
    assert outflow.rate == pytest.approx(9 * MB)
    windows(outflow, [MB] * WINDOWS, arrived=arrived, now=now, under_way_s=TRIP_S + 0.08)
    assert outflow.rate == pytest.approx(9 * MB), "and change nothing that is known of it"


def test_a_burst_that_is_paced_does_not_make_the_line_look_slower_from_time_to_time():
    """Paced to what was measured, and a trip longer than that each time: the trip is not the line's."""
    outflow, arrived, now, rate = UplinkRate(), 0, 0.0, 1.25 * MB
    for _ in range(20 * KNOWN):
        burst = 600_000
        outflow.look(now, 2, arrived, burst, TRIP_S)
        now += TRIP_S
        for left in range(burst - 8000, -1, -8000):
            now += 8000 / rate
            arrived += 8000
            outflow.look(now, 2 if left else 0, arrived, left, TRIP_S)
        now += 1.0
        rate = min(AIR * outflow.rate, 1.25 * MB) or rate
    assert outflow.rate == pytest.approx(1.25 * MB, rel=0.01)


def test_too_short_a_look_says_nothing():
    outflow = UplinkRate()
    windows(outflow, [MB] * KNOWN, every_s=0.001)
    assert outflow.rate == 0, "a fifth of a second"
    outflow = UplinkRate()
    outflow.look(0.0, 2, 0, 9, TRIP_S)
    for n in range(1, ARRIVALS * KNOWN + 1):
        outflow.look(float(n), 2, n, 9, TRIP_S)
    assert outflow.rate == 0, "one acknowledgement is missing: with the first the line began to flow"
    outflow.look(float(ARRIVALS * KNOWN + 1), 2, ARRIVALS * KNOWN + 1, 9, TRIP_S)
    assert outflow.rate == pytest.approx(1.0)


def test_nobody_is_paced_to_the_first_seconds_of_a_line():
    outflow = UplinkRate()
    now, arrived = windows(outflow, [MB] * (KNOWN - 1))
    assert outflow.rate == 0
    windows(outflow, [9 * MB], arrived=arrived, now=now)
    assert outflow.rate == pytest.approx(MB), "the best quarter of eight: the second"


def test_a_link_that_is_closed_takes_its_bytes_along():
    outflow = UplinkRate()
    outflow.look(0.0, 2, 10_000, 9, TRIP_S)
    outflow.look(0.0, 2, 11_000, 9, TRIP_S)
    outflow.look(1.0, 2, 500, 9, TRIP_S)
    windows(outflow, [1000.0] * KNOWN, arrived=500, now=1.0)
    assert outflow.rate == pytest.approx(1000)


def test_links_get_the_parts_with_which_all_are_done_at_once():
    pacing = UplinkShares()
    pacing.begin("a step", {"b": 3000, "c": 1000, "d": 0})
    uplink = 12 * MB
    assert pacing.rates(uplink).get("b", math.inf) == pytest.approx(AIR * 9 * MB)
    assert pacing.rates(uplink).get("c", math.inf) == pytest.approx(AIR * 3 * MB)
    assert (
        pacing.rates(uplink).get("d", math.inf)
        == pacing.rates(uplink).get("somebody else", math.inf)
        == math.inf
    )
    assert pacing.rates(0.0).get("b", math.inf) == math.inf, "it is not known what the line carries"
    assert pacing.rates(PACED_BELOW).get("b", math.inf) == math.inf, "nobody waits for such a line"


def test_who_is_behind_gets_more_and_nobody_less():
    pacing = UplinkShares()
    pacing.begin("a step", {"b": 2000, "c": 2000})
    assert pacing.arrived("a step", "b", 1500)
    assert pacing.rates(10 * MB).get("b", math.inf) == pytest.approx(AIR * 5 * MB)
    assert pacing.rates(10 * MB).get("c", math.inf) == pytest.approx(AIR * 8 * MB)
    assert pacing.arrived("a step", "b", 800), "some of it was of a plan before"
    assert pacing.rates(10 * MB).get("c", math.inf) == pytest.approx(AIR * 10 * MB), "it is alone"
    assert pacing.arrived("a step", "c", 2000)
    assert pacing.rates(10 * MB).get("c", math.inf) == pytest.approx(AIR * 5 * MB)
    assert not pacing.arrived("another step", "c", 1)
    assert not pacing.arrived("a step", "somebody else", 1)


def test_only_the_end_of_the_latest_reduce_ends_it():
    pacing = UplinkShares()
    pacing.begin("first", {"b": 1})
    pacing.begin("second", {"b": 1})
    assert not pacing.end("first")
    assert pacing.rates(MB).get("b", math.inf) == AIR * MB
    assert pacing.end("second")
    assert pacing.rates(MB).get("b", math.inf) == math.inf
