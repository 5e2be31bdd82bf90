"""Steps in virtual time: uplinks that are shared, pipelines that wait for the slowest part, steps that
overlap, and what is said of it.
"""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.stages.pipeline.routes import Hop
from hetpeer.stages.planning.step_estimate import estimate
from hetpeer.stages.planning.uplinks import PeerLink, Timeline, Uplink
from hetpeer.stages.planning.virtual_swarm import VirtualSwarm, VirtualVolunteer
from tests.amounts import examples

# ── uplinks ─────────────────────────────────────────────────────────────────────────────────────────────────


def sent(capacity, rates, *bundles):
    """When each of `bundles`, (at, to, bytes), is there; and for how long the uplink was busy."""
    timeline = Timeline()
    uplink = Uplink(timeline, capacity, {to: PeerLink(rate=rate, delay_s=1.0) for to, rate in rates.items()})
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


@pytest.mark.parametrize("sizes", [[10.0] * 64, [float(1 + n * n % 17) for n in range(64)]])
def test_what_begins_together_takes_as_long_as_one_by_one_and_ends_together_at_once(sizes):
    """In a large swarm everybody sends a part of its sum to everybody else: the uplink is not divided anew
    for each.
    """

    class Counting(Timeline):
        planned = 0

        def after(self, seconds, happens):
            self.planned += 1
            super().after(seconds, happens)

    bundles = {str(number): nbytes for number, nbytes in enumerate(sizes)}
    rates = {to: PeerLink(rate=(1.0, 8.0)[number % 2], delay_s=0.5) for number, to in enumerate(bundles)}
    found = []
    for together in (True, False):
        timeline, there = Counting(), []
        uplink = Uplink(timeline, 128.0, rates)

        def arrives(timeline=timeline, there=there):
            there.append(timeline.now)

        if together:
            uplink.send_all(bundles, arrives)
        else:
            for to, nbytes in bundles.items():
                uplink.send(to, nbytes, arrives)
        timeline.run(lambda there=there: len(there) == len(bundles))
        found.append((there, uplink.busy_s))
        if together:
            assert timeline.planned <= len(bundles) + 2 * len(set(sizes)) + 1, (
                "arrivals, and ends of each size"
            )
    assert found[0] == found[1]


def test_time_that_stands_still_is_a_bug():
    with pytest.raises(RuntimeError, match="nothing is under way"):
        Timeline().run(lambda: False)


# ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────


def chain(stages, microbatches):
    """Routes of every microbatch through `stages` peers of a block each, called `0`, `1`, …"""
    route = tuple(Hop(str(number), number, number + 1) for number in range(stages))
    return dict.fromkeys(range(microbatches), route)


def lines(stages, line):
    return {(str(a), str(b)): line for a, b in itertools.permutations(range(stages), 2)}


NEAR = PeerLink(rate=1e12, activation_bytes=1, gradient_bytes=1)


def test_the_slowest_worker_sets_the_pace():
    machines = {
        str(n): VirtualVolunteer(forward_s=work, backward_s=2 * work)
        for n, work in enumerate((0.1, 0.3, 0.1))
    }
    found = estimate(machines, lines(3, NEAR), chain(3, 20), between_s=1.0)
    assert found.bottleneck == ("computing", "1")
    # 20 microbatches at the slowest, and at the others the forward and the backward before and after them
    assert found.seconds == pytest.approx(20 * 0.9 + 2 * 0.3 - 0.3 + 1.0, rel=0.02)
    assert found.computing["1"] == pytest.approx(20 * 0.9 / found.seconds)
    assert found.computing["0"] == pytest.approx(20 * 0.3 / found.seconds)


def test_an_uplink_carries_both_ways_of_a_middle_stage():
    """Gradients go back over the line by which activations leave: at half the rate each, where it is
    shared.
    """
    quick = VirtualVolunteer(forward_s=0.001, backward_s=0.002)
    line = PeerLink(rate=100.0, activation_bytes=100, gradient_bytes=100)
    alone = estimate(dict.fromkeys("012", quick), lines(3, line), chain(3, 20))
    shared = {
        **dict.fromkeys("02", quick),
        "1": VirtualVolunteer(forward_s=0.001, backward_s=0.002, uplink=100.0),
    }
    found = estimate(shared, lines(3, line), chain(3, 20))
    assert found.bottleneck == ("sending", "1")
    assert found.seconds == pytest.approx(40.0, rel=0.1)
    assert alone.seconds == pytest.approx(20.0, rel=0.25)


def test_a_pipeline_waits_for_whoever_is_late():
    """Times that vary around the same mean cost one machine nothing, and several that wait for each other
    a part of a step: the more, the more they vary.
    """

    def taken(stages, varies):
        machines = {
            str(n): VirtualVolunteer(forward_s=0.1, backward_s=0.2, varies=varies) for n in range(stages)
        }
        return estimate(machines, lines(stages, NEAR), chain(stages, 16)).seconds

    assert taken(1, 0.5) == pytest.approx(taken(1, 0.0), rel=0.03)
    even, some, much = (taken(4, varies) for varies in (0.0, 0.25, 0.5))
    assert 1.02 * even < some < 0.98 * much < 1.3 * even
    assert taken(4, 0.5) == much, "the same swarm has the same prediction"


def test_two_pipelines_share_a_step():
    machines = dict.fromkeys("0123", VirtualVolunteer(forward_s=0.1, backward_s=0.2))
    ways = [(Hop("0", 0, 1), Hop("1", 1, 2)), (Hop("2", 0, 1), Hop("3", 1, 2))]
    routes = {number: ways[number % 2] for number in range(20)}
    both = VirtualSwarm(machines, lines(4, NEAR), routes).step().seconds
    one = VirtualSwarm(machines, lines(4, NEAR), dict.fromkeys(range(20), ways[0])).step().seconds
    assert both == pytest.approx(10 * 0.3 + 0.3, rel=0.01)
    assert one == pytest.approx(20 * 0.3 + 0.3, rel=0.01)


# ── steps that overlap ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("between_s", "staleness", "seconds"),
    [
        (1.0, 0, 16 * 0.3 + 3 * 0.3 + 1.0),
        (1.0, 1, 16 * 0.3),
        (1.0, 2, 16 * 0.3),
        (6.0, 1, 6.0),
        (6.0, 2, 6.0),
    ],
    ids=["one after the other", "two at a time", "three", "long sums, two", "long sums, three"],
)
def test_steps_that_overlap_take_as_long_as_the_busiest_stage(between_s, staleness, seconds):
    """Filling and draining the pipeline (0.9 s) and what lies between two steps hide behind the next
    step's work; sums go one after the other.
    """
    machines = dict.fromkeys("0123", VirtualVolunteer(forward_s=0.1, backward_s=0.2))
    found = estimate(machines, lines(4, NEAR), chain(4, 16), between_s, staleness)
    assert found.seconds == pytest.approx(seconds, rel=1e-6)
    assert found.computing == pytest.approx(dict.fromkeys("0123", 16 * 0.3 / seconds), rel=0.01)


def test_few_microbatches_take_more_steps_at_a_time():
    """Eight do not hide a pipeline of four that drains, and a second, behind one more step; behind two
    they do.
    """
    machines = dict.fromkeys("0123", VirtualVolunteer(forward_s=0.1, backward_s=0.2))
    one, two, three = (
        estimate(machines, lines(4, NEAR), chain(4, 8), 1.0, staleness).seconds for staleness in range(3)
    )
    assert one == pytest.approx(8 * 0.3 + 3 * 0.3 + 1.0)
    assert 8 * 0.3 < two < 1.05 * 8 * 0.3
    assert three == pytest.approx(8 * 0.3)


def test_what_the_update_takes_of_a_worker_is_not_free_for_the_next_step():
    machines = dict.fromkeys("012", VirtualVolunteer(forward_s=0.1, backward_s=0.2, update_s=0.4))
    slow = PeerLink(rate=100.0, activation_bytes=10, gradient_bytes=10, sums_bytes=500)
    steps = [estimate(machines, lines(3, NEAR), chain(3, 20), 1.0, staleness) for staleness in (0, 1)]
    assert [step.seconds for step in steps] == pytest.approx(
        [20 * 0.3 + 2 * 0.3 + 1.0, 20 * 0.3 + 0.4], rel=0.01
    )
    found = estimate(machines, {**lines(3, NEAR), ("1", "2"): slow}, chain(3, 20), 1.0, 1)
    assert found.sending["1"] * found.seconds == pytest.approx(20 * 10 / 100 + 500 / 100, rel=0.01)
    found = estimate(machines, {**lines(3, NEAR), ("1", "2"): slow}, chain(3, 40), 1.0, 1)
    assert found.seconds == pytest.approx(40 * 0.3 + 0.4, rel=0.01), "sums leave beside the work"


SECONDS = st.floats(0.001, 1.0)


@st.composite
def swarms(draw):
    """One or two pipelines of up to four stages, alike in nothing."""
    stages, pipelines = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    ways = [
        tuple(Hop(f"{row}{stage}", stage, stage + 1) for stage in range(stages)) for row in range(pipelines)
    ]
    routes = {number: ways[number % pipelines] for number in range(draw(st.integers(pipelines, 10)))}
    uplinks = st.just(math.inf) | st.floats(10.0, 1000.0)
    machines = {
        hop.peer: VirtualVolunteer(
            forward_s=draw(SECONDS), backward_s=draw(SECONDS), update_s=draw(SECONDS), uplink=draw(uplinks)
        )
        for way in ways
        for hop in way
    }
    nbytes = st.floats(1.0, 100.0)
    found = {
        pair: PeerLink(
            rate=draw(st.floats(10.0, 1000.0)),
            delay_s=draw(SECONDS),
            activation_bytes=draw(nbytes),
            gradient_bytes=draw(nbytes),
            sums_bytes=draw(nbytes),
        )
        for way in ways
        for one, other in itertools.pairwise(way)
        for pair in ((one.peer, other.peer), (other.peer, one.peer))
    }
    return machines, found, routes


@examples(30)
@given(swarms(), st.floats(0.0, 20.0))
def test_one_after_the_other_they_take_their_work_and_what_lies_between(swarm, between_s):
    """With sums and updates that are over by then: they are a part of what lies between."""
    machines, found, routes = swarm
    machines = {peer: dataclasses.replace(machine, update_s=0.0) for peer, machine in machines.items()}
    found = {pair: dataclasses.replace(line, sums_bytes=0.0) for pair, line in found.items()}
    one, other = (VirtualSwarm(machines, found, routes, between_s=seconds) for seconds in (0.0, between_s))
    steps = [(one.step().seconds, other.step().seconds) for _ in range(13)]
    assert [after for _, after in steps] == pytest.approx(
        [first + between_s for first, _ in steps], rel=1e-9, abs=1e-8
    )
    said = estimate(machines, found, routes, between_s).seconds
    assert said == pytest.approx(sum(first for first, _ in steps[5:]) / 8 + between_s, rel=1e-9, abs=1e-8)


@examples(30)
@given(swarms(), st.floats(0.0, 10.0), st.integers(0, 3))
def test_no_step_is_faster_than_the_busiest_worker_and_line(swarm, between_s, staleness):
    """However many overlap, from the first one on: nothing is done twice, forgotten, or at the same time
    as something else.
    """
    machines, found, routes = swarm
    passed = {peer: sum(peer in {hop.peer for hop in way} for way in routes.values()) for peer in machines}
    least = [between_s]
    for peer, one in machines.items():
        least.append(passed[peer] * (one.forward_s + one.backward_s) + one.update_s)
        carried = {
            to: passed[peer] * (line.activation_bytes if to > peer else line.gradient_bytes) + line.sums_bytes
            for (sender, to), line in found.items()
            if sender == peer
        }
        least += [nbytes / found[peer, to].rate for to, nbytes in carried.items()]
        least.append(sum(carried.values()) / one.uplink)
    # of the last steps' sums and updates some may be left when they are over
    running, steps = VirtualSwarm(machines, found, routes, staleness=staleness, between_s=between_s), 8
    after = [running.step() for _ in range(steps)]
    assert sum(step.seconds for step in after) >= (steps - 1) * max(least) * (1 - 1e-9)
    assert all(0 <= busy <= step.seconds + 1e-9 for step in after for busy in step.computing.values())
    assert all(0 <= busy <= step.seconds + 1e-9 for step in after for busy in step.sending.values())
    assert estimate(machines, found, routes, between_s, staleness).seconds >= max(least) * (1 - 1e-9)
