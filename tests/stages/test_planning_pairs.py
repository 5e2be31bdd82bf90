"""Latency and rate of all pairs from what was measured, and what false claims can do to them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hetpeer.stages.planning.network_coordinates import Coordinate
from hetpeer.stages.planning.pair_lines import (
    ENDS,
    MEASURED,
    MOST_LINES,
    RATES,
    UNKNOWN,
    LineEnd,
    MeasuredLine,
    believed,
    pair_lines,
)
from hetpeer.stages.planning.swarms.plan_inputs import LATENCY_S, LINE


def towns(each: int, apart_s: float = 0.2) -> list[LineEnd]:
    """So many peers in each of two towns, with 100 MB/s each."""
    return [
        LineEnd(uplink=1e8, downlink=1e8, coordinate=Coordinate((town * apart_s, 0.0, 0.0), 2e-3, 0.05))
        for town in range(2)
        for _ in range(each)
    ]


def test_nothing_is_known() -> None:
    pairs = pair_lines([LineEnd(), LineEnd()], {})
    assert pairs.rate[0, 1] == LINE
    assert pairs.latency[0, 1] == LATENCY_S
    assert (pairs.latency_error[0, 1], pairs.rate_error[0, 1]) == (UNKNOWN, ENDS)
    assert not pairs.measured.any()


def test_measured_lines_are_what_they_are() -> None:
    ends = [LineEnd(uplink=2e6), LineEnd(uplink=4e6, downlink=1e6), LineEnd()]
    pairs = pair_lines(ends, {(0, 1): MeasuredLine(rate=1.5e6, trip_s=0.03)})
    assert pairs.rate[0, 1] == 1.5e6
    assert pairs.measured[0, 1]
    assert pairs.latency[0, 1] == pairs.latency[1, 0] == 0.015
    assert pairs.rate_error[0, 1] == MEASURED
    assert pairs.up.tolist() == [2e6, 4e6, 3e6], "an unknown uplink is as the middle of the others"
    assert pairs.down.tolist() == [2e6, 1.5e6, 3e6], "no less than came over a line"
    assert pairs.rate[2, 1] == 1.5e6
    assert pairs.doubt[0, 1] == 1.0
    assert pairs.doubt[2, 1] > 1.0


def test_a_line_that_may_carry_more_carries_at_least_that() -> None:
    """Short bundles over far lines showed 1 MB/s: that makes no other line slow, nor an unknown uplink."""
    ends = [replace(end, uplink=0.0) if number == 0 else end for number, end in enumerate(towns(2))]
    short = MeasuredLine(rate=1e6, trip_s=0.2, at_least=True)
    pairs = pair_lines(ends, {(0, 2): short, (1, 2): short, (3, 2): MeasuredLine(rate=1.2e8)})
    assert pairs.up[0] == 1e8, "as the middle of the others, not as slow as its line"
    assert pairs.rate[0, 2] == pairs.rate[0, 3] == 1e8
    assert not pairs.measured[0, 2]
    assert pairs.rate_error[0, 2] > MEASURED
    assert pairs.down[2] == 1.2e8
    fast = pair_lines(ends, {(0, 1): MeasuredLine(rate=2e8, at_least=True)})
    assert fast.up[0] == fast.down[1] == fast.rate[0, 1] == 2e8


def test_lines_that_carry_together_what_each_does_alone_share_no_uplink() -> None:
    """8 and 7 MB/s by themselves. 14 MB/s were seen at once, so nothing but the lines limits them; 9 is a
    limit. So is 9 if one of them carries that alone.
    """

    def together(uplink: float, *rates: float) -> float:
        ends = [LineEnd(uplink=uplink), *[LineEnd(uplink=1e8)] * len(rates)]
        lines = {(0, number): MeasuredLine(rate=rate) for number, rate in enumerate(rates, 1)}
        return float(pair_lines(ends, lines).together[0])

    assert together(1.4e7, 8e6, 7e6) == LINE
    assert together(9e6, 8e6, 7e6) == 9e6
    assert together(9e6, 4.5e6, 4.5e6, 9e6) == 9e6
    assert together(9e6, 4e6) == 9e6, "one line says nothing"


def test_latency_is_that_of_the_coordinates() -> None:
    pairs = pair_lines(towns(2), {})
    assert pairs.latency[0, 1] == pytest.approx(2e-3)
    assert pairs.latency[0, 2] == pytest.approx(0.102)
    assert pairs.latency_error[0, 2] == pytest.approx(math.hypot(0.05, 0.05))


def test_of_who_has_no_coordinate_nothing_but_the_usual_is_known() -> None:
    pairs = pair_lines([*towns(1), LineEnd()], {})
    assert pairs.latency[0, 2] == pairs.latency[2, 1] == pairs.latency[0, 1] == pytest.approx(0.102)
    assert pairs.latency_error[0, 2] == UNKNOWN


def test_a_way_that_is_slow_for_some_is_slow_for_their_neighbours() -> None:
    """Three lines from town to town carry 5 MB/s; nothing is known of those inside."""
    lines = {pair: MeasuredLine(rate=5e6) for pair in ((0, 4), (1, 5), (6, 2))}
    pairs = pair_lines(towns(4), lines)
    assert pairs.rate[3, 7] == 5e6
    assert pairs.rate[7, 3] == 5e6
    assert pairs.rate[0, 1] == 1e8
    assert pairs.rate_error[3, 7] < ENDS, "several agree"
    assert not pairs.measured[3, 7]


def test_one_line_alone_says_nothing_of_others_that_are_not_near() -> None:
    pairs = pair_lines(towns(3), {(0, 1): MeasuredLine(rate=1e6)})
    assert pairs.rate[0, 3] == 1e8


def test_one_claim_decides_nothing() -> None:
    """A liar says that its lines carry next to nothing; two neighbours measured them, too."""
    honest = {(1, 4): MeasuredLine(rate=5e6), (2, 5): MeasuredLine(rate=5e6), (5, 1): MeasuredLine(rate=5e6)}
    for lie in (1.0, 1e30):
        pairs = pair_lines(towns(4), honest | {(0, 6): MeasuredLine(rate=lie)})
        assert pairs.rate[3, 7] == 5e6


def test_a_claim_that_all_lines_of_a_peer_contradict_is_not_believed() -> None:
    ends = towns(3)
    slow = {(0, 1): MeasuredLine(rate=1e6), (0, 2): MeasuredLine(rate=1e6)}
    pairs = pair_lines(ends, slow)
    assert (pairs.up[0], pairs.down[0], pairs.down[1]) == (1e6, 1e8, 1e8)
    assert pair_lines(ends, dict([*slow.items()][:1])).up[0] == 1e8, "it may be the other end"
    to_it = {(b, a): line for (a, b), line in slow.items()}
    assert pair_lines(ends, to_it).down[0] == 1e6


def test_a_peer_whose_lines_are_as_slow_as_those_of_its_neighbours_is_not_contradicted() -> None:
    """All that goes from town to town is slow: it is the way, not the line of each."""
    lines = {(a, b): MeasuredLine(rate=5e6) for a in range(3) for b in range(3, 6)}
    pairs = pair_lines(towns(3), lines)
    assert pairs.up.tolist() == [1e8] * 6
    assert pairs.rate[0, 1] == 1e8


@pytest.mark.parametrize("rate", [1e-300, 1.0, 1e18])
def test_no_claim_breaks_the_arithmetic(rate: float) -> None:
    assert believed(0.0) == 0.0
    assert RATES[0] <= believed(rate) <= RATES[1]
    ends = [replace(end, uplink=rate, downlink=1e18 / rate if rate > 1 else rate) for end in towns(2)]
    lines = {(0, 1): MeasuredLine(rate=rate, trip_s=1e18), (1, 2): MeasuredLine(rate=1.0, trip_s=1e-300)}
    pairs = pair_lines(ends, lines)
    for found in (pairs.latency, pairs.latency_error, pairs.rate, pairs.rate_error):
        assert np.isfinite(found).all()
    off = ~np.eye(4, dtype=np.bool_)
    assert (pairs.rate[off] > 0).all()


def test_a_front_limits_nobody() -> None:
    pairs = pair_lines([*towns(1), LineEnd(wide=True)], {})
    assert pairs.rate[0, 2] == 1e8
    assert pairs.up[2] == pairs.down[2] == LINE


def test_very_many_lines_are_thinned_out() -> None:
    count = 30
    lines = {(a, b): MeasuredLine(rate=5e6 + a) for a in range(count) for b in range(count) if a != b}
    assert len(lines) > MOST_LINES
    pairs = pair_lines([LineEnd(uplink=1e8)] * count, lines)
    assert pairs.measured.sum() == len(lines)
