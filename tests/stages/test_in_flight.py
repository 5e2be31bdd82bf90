"""Links hidden behind computation: the window, and real pipelines on lines that take as long as the work."""

import itertools

import pytest

from hetpeer.stages.pipeline.routes import Hop
from hetpeer.stages.pipeline.schedule_1f1b import InFlightWindow, shortest
from hetpeer.stages.planning.uplinks import PeerLink
from hetpeer.stages.planning.virtual_swarm import VirtualSwarm, VirtualVolunteer

STEP = "step"


def test_as_many_as_fill_the_way():
    window = InFlightWindow()
    assert window.depth(1) == shortest(1) == 3
    for number in range(8):  # one after the other, each 10 s on its way
        window.begun((STEP, number), 1, 10.0 * number)
        window.finished((STEP, number), 10.0 * number + 10)
    assert window.depth(1) == 3
    window.end_step(STEP)
    for number in range(8):  # eight at a time return, one a second
        window.begun((STEP, number), 1, 100.0 + number)
    for number in range(8):
        window.finished((STEP, number), 110.0 + number)
    assert window.depth(1) == 2 * 8 + 1, "twice what returns while one is under way"
    assert window.depth(0) == 1, "nothing is between the last hop and the loss"
    window.reset(most=4)
    assert window.depth(1) == 3
    window.reset(most=4, devices=3)
    assert [window.depth(hops) for hops in (0, 1, 2)] == [3, 4, 5], "one more each, as far as memory allows"


def test_the_first_of_a_step_shows_the_way_anew():
    """The line became ten times as long meanwhile, and short again: a step later that is known."""
    window = InFlightWindow()
    for trip in (1.0, 10.0, 1.0):
        for number in range(20):
            window.begun((STEP, number), 1, 0.1 * number)
        window.finished((STEP, 0), trip)
        assert window.depth(1) <= 2 * 20 * trip + 1
        for number in range(1, 20):
            window.finished((STEP, number), trip + 0.1 * number)
        window.end_step(STEP)
    assert 2 * 10 < window.depth(1) <= 2 * 20 + 1


def test_memory_is_the_limit_and_what_never_returns_is_forgotten():
    window = InFlightWindow()
    window.reset(most=5)
    for number in range(40):
        window.begun((STEP, number), 2, 0.0)
    for number in range(30):
        window.finished((STEP, number), 10.0)
    assert window.depth(2) == 5
    window.end_step(STEP)
    window.finished((STEP, 35), 11.0)
    window.finished((STEP, "unheard of"), 11.0)
    assert window.depth(2) == 5


def test_a_step_that_ends_leaves_what_is_under_way_of_others():
    window = InFlightWindow()
    for step in ("older", "newer"):
        window.begun((step, 0), 1, 0.0)
    window.end_step("older")
    window.finished(("older", 0), 5.0)
    assert window.depth(1) == shortest(1), "it did not come back in time"
    window.finished(("newer", 0), 5.0)
    assert window.depth(1) == shortest(1) == 3
    window.begun(("newer", 1), 1, 5.0)
    window.finished(("newer", 1), 6.0)
    assert window.depth(1) == 3


def test_steps_that_overlap_show_how_many_return():
    """One begins whenever one of the step before returns: eight are always under way, ten seconds long,
    whichever step ends meanwhile.
    """
    window = InFlightWindow()
    for number in range(8):
        window.begun((0, number), 1, float(number))
    for step in range(5):
        for number in range(8):
            now = 10.0 * (step + 1) + number
            window.finished((step, number), now)
            window.begun((step + 1, number), 1, now)
        window.end_step(step)
        assert window.depth(1) == 2 * 8 + 1


@pytest.mark.parametrize(
    ("stages", "hop_s", "latency_s", "bound", "gain"),
    [
        (2, 0.2, 0.0, 1.15, 1.25),
        (4, 0.2, 0.05, 1.45, 1.15),
        (4, 0.02, 0.3, 1.45, 1.15),
        (3, 0.001, 0.0, 1.15, 0.99),
    ],
    ids=["as long as computing", "four stages", "far away", "next door"],
)
def test_a_link_as_slow_as_the_work_is_hidden_after_a_few_steps(stages, hop_s, latency_s, bound, gain):
    """DT-FM 3.5: the step is little more than the larger of both sums; what is more is the way of the
    first and last.
    """
    work, microbatches = 0.2, 32
    peers = [str(number) for number in range(stages)]
    route = tuple(Hop(peer, number, number + 1) for number, peer in enumerate(peers))
    line = PeerLink(rate=1 / hop_s, delay_s=latency_s, activation_bytes=1, gradient_bytes=1)
    lines = dict.fromkeys(itertools.permutations(peers, 2), line)
    machines = dict.fromkeys(peers, VirtualVolunteer(forward_s=work / 3, backward_s=work * 2 / 3))
    routes = dict.fromkeys(range(microbatches), route)
    before = VirtualSwarm(machines, lines, routes, most=1).step().seconds
    swarm = VirtualSwarm(machines, lines, routes)
    found = [swarm.step().seconds for _ in range(6)][-1]
    assert found <= bound * microbatches * max(work, hop_s), (before, found)
    assert found * gain <= before, (before, found)
    assert swarm.windows["0"].depth(stages - 1) <= 32
