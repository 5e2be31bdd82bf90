"""What an uplink carries, and which link may use how much of it while we reduce."""

import math

import pytest

from hetpeer.peer.transport.outflow import ARRIVALS, KNOWN, WINDOWS, Outflow
from hetpeer.peer.transport.pacing import AIR, PACED_BELOW, Pacing

MB = 1e6


def windows(outflow, rates, links=2, arrived=0, now=0.0, every_s=0.1):
    """`ARRIVALS` acknowledgements at each of `rates`, in bytes/s."""
    outflow.look(now, links, arrived)
    for rate in rates:
        for _ in range(ARRIVALS):
            now, arrived = now + every_s, arrived + round(rate * every_s)
            outflow.look(now, links, arrived)
    return now, arrived


def test_an_uplink_carries_what_it_carried_at_its_best():
    outflow = Outflow()
    now, arrived = windows(outflow, [MB, 2 * MB, 12 * MB, 11 * MB, 12 * MB, 3 * MB, 4 * MB, 12.1 * MB])
    assert outflow.rate == pytest.approx(12 * MB)
    windows(outflow, [5 * MB] * WINDOWS, arrived=arrived, now=now)
    assert outflow.rate == pytest.approx(5 * MB), "a line that has become slower is found out"


def test_one_link_says_nothing_of_the_uplink():
    outflow = Outflow()
    now, arrived = windows(outflow, [9 * MB] * 3, links=1)
    assert outflow.rate == 0
    windows(outflow, [2 * MB] * KNOWN, arrived=arrived, now=now)
    assert outflow.rate == pytest.approx(2 * MB)


def test_time_in_which_nothing_is_under_way_does_not_count():
    outflow = Outflow()
    arrived = 0
    for burst in range(ARRIVALS * KNOWN):
        outflow.look(100.0 * burst, 2, arrived)
        arrived += 1000
        outflow.look(100.0 * burst + 0.1, 0, arrived)
    assert outflow.rate == pytest.approx(10_000)


def test_too_short_a_look_says_nothing():
    outflow = Outflow()
    windows(outflow, [MB] * KNOWN, every_s=0.001)
    assert outflow.rate == 0, "a fifth of a second"
    outflow = Outflow()
    outflow.look(0.0, 2, 0)
    for n in range(1, ARRIVALS * KNOWN):
        outflow.look(float(n), 2, n)
    assert outflow.rate == 0, "one acknowledgement is missing"
    outflow.look(float(ARRIVALS * KNOWN), 2, ARRIVALS * KNOWN)
    assert outflow.rate == pytest.approx(1.0)


def test_nobody_is_paced_to_the_first_seconds_of_a_line():
    outflow = Outflow()
    now, arrived = windows(outflow, [MB] * (KNOWN - 1))
    assert outflow.rate == 0
    windows(outflow, [9 * MB], arrived=arrived, now=now)
    assert outflow.rate == pytest.approx(MB), "the best quarter of eight: the second"


def test_a_link_that_is_closed_takes_its_bytes_along():
    outflow = Outflow()
    outflow.look(0.0, 2, 10_000)
    outflow.look(1.0, 2, 500)
    windows(outflow, [1000.0] * KNOWN, arrived=500, now=1.0)
    assert outflow.rate == pytest.approx(1000)


def test_links_get_the_parts_with_which_all_are_done_at_once():
    pacing = Pacing()
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
    pacing = Pacing()
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
    pacing = Pacing()
    pacing.begin("first", {"b": 1})
    pacing.begin("second", {"b": 1})
    assert not pacing.end("first")
    assert pacing.rates(MB).get("b", math.inf) == AIR * MB
    assert pacing.end("second")
    assert pacing.rates(MB).get("b", math.inf) == math.inf
