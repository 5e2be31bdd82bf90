"""Steps in virtual time: uplinks that are shared, pipelines that wait for the slowest part, and what is said of it."""

import itertools
import math

import pytest

from hetpeer.stages.execution.routes import Hop
from hetpeer.stages.planning.estimate import estimate
from hetpeer.stages.planning.timeline import Timeline
from hetpeer.stages.planning.uplinks import Line, Uplink
from hetpeer.stages.planning.virtual import Machine, VirtualSwarm

# ── uplinks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def sent(capacity, rates, *bundles):
    """When each of `bundles`, (at, to, bytes), is there; and for how long the uplink was busy."""
    timeline = Timeline()
    uplink = Uplink(timeline, capacity, {to: Line(rate=rate, delay_s=1.0) for to, rate in rates.items()})
    there = {}
    for number, (at, to, nbytes) in enumerate(bundles):

        def send(number=number, to=to, nbytes=nbytes):
            uplink.send(to, nbytes, lambda: there.setdefault(number, timeline.now))

        timeline.after(at, send)
    timeline.run(lambda: len(there) == len(bundles))
    return [there[number] for number in range(len(bundles))], uplink.busy_s


def test_a_line_carries_one_bundle_after_the_other():
    assert sent(math.inf, {"a": 10.0}, (0, "a", 20), (0, "a", 30), (20, "a", 10)) == ([3.0, 6.0, 22.0], 6.0)


def test_lines_of_their_own_do_not_wait_for_each_other():
    assert sent(math.inf, {"a": 10.0, "b": 1.0}, (0, "a", 20), (0, "b", 20))[0] == [3.0, 21.0]


def test_lines_share_what_leaves_the_house():
    """Half each while both have something; what the slower one cannot use is the other's."""
    times, busy = sent(10.0, {"a": 10.0, "b": 10.0}, (0, "a", 20), (0, "b", 30))
    assert times == pytest.approx([4 + 1, 5 + 1])
    assert busy == pytest.approx(5.0)
    assert sent(10.0, {"a": 10.0, "b": 2.0}, (0, "a", 16), (0, "b", 20))[0] == pytest.approx([2 + 1, 10 + 1])


def test_time_that_stands_still_is_a_bug():
    with pytest.raises(RuntimeError, match="nothing is under way"):
        Timeline().run(lambda: False)


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def chain(stages, microbatches):
    """Routes of every microbatch through `stages` peers of a block each, called `0`, `1`, …"""
    route = tuple(Hop(str(number), number, number + 1) for number in range(stages))
    return dict.fromkeys(range(microbatches), route)


def lines(stages, line):
    return {(str(a), str(b)): line for a, b in itertools.permutations(range(stages), 2)}


NEAR = Line(rate=1e12, activation_bytes=1, gradient_bytes=1)


def test_the_slowest_worker_sets_the_pace():
    machines = {
        str(n): Machine(forward_s=work, backward_s=2 * work) for n, work in enumerate((0.1, 0.3, 0.1))
    }
    found = estimate(machines, lines(3, NEAR), chain(3, 20), between_s=1.0)
    assert found.bottleneck == ("computing", "1")
    # 20 microbatches at the slowest, and at the others the forward and the backward before and after them
    assert found.seconds == pytest.approx(20 * 0.9 + 2 * 0.3 - 0.3 + 1.0, rel=0.02)
    assert found.computing["1"] == pytest.approx(20 * 0.9 / found.seconds)
    assert found.computing["0"] == pytest.approx(20 * 0.3 / found.seconds)


def test_an_uplink_carries_both_ways_of_a_middle_stage():
    """Gradients go back over the line by which activations leave: at half the rate each, where it is shared."""
    quick = Machine(forward_s=0.001, backward_s=0.002)
    line = Line(rate=100.0, activation_bytes=100, gradient_bytes=100)
    alone = estimate(dict.fromkeys("012", quick), lines(3, line), chain(3, 20))
    shared = {**dict.fromkeys("02", quick), "1": Machine(forward_s=0.001, backward_s=0.002, uplink=100.0)}
    found = estimate(shared, lines(3, line), chain(3, 20))
    assert found.bottleneck == ("sending", "1")
    assert found.seconds == pytest.approx(40.0, rel=0.1)
    assert alone.seconds == pytest.approx(20.0, rel=0.25)


def test_two_pipelines_share_a_step():
    machines = dict.fromkeys("0123", Machine(forward_s=0.1, backward_s=0.2))
    ways = [(Hop("0", 0, 1), Hop("1", 1, 2)), (Hop("2", 0, 1), Hop("3", 1, 2))]
    routes = {number: ways[number % 2] for number in range(20)}
    both = VirtualSwarm(machines, lines(4, NEAR), routes).step().seconds
    one = VirtualSwarm(machines, lines(4, NEAR), dict.fromkeys(range(20), ways[0])).step().seconds
    assert both == pytest.approx(10 * 0.3 + 0.3, rel=0.01)
    assert one == pytest.approx(20 * 0.3 + 0.3, rel=0.01)
