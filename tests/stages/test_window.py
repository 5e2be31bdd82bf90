"""Links hidden behind computation: the window, and real pipelines on lines that take as long as the work."""

import heapq
import itertools
from collections import defaultdict

import pytest

from hetpeer.stages.execution import effects as p
from hetpeer.stages.execution.pipeline import Pipeline
from hetpeer.stages.execution.routes import Hop
from hetpeer.stages.execution.window import Window, shortest


def test_as_many_as_fill_the_way():
    window = Window()
    assert window.depth(1) == shortest(1) == 3
    for number in range(8):  # one after the other, each 10 s on its way
        window.begun(number, 1, 10.0 * number)
        window.finished(number, 10.0 * number + 10)
    assert window.depth(1) == 3
    window.end_step()
    for number in range(8):  # eight at a time return, one a second
        window.begun(number, 1, 100.0 + number)
    for number in range(8):
        window.finished(number, 110.0 + number)
    assert window.depth(1) == 2 * 8 + 1, "twice what returns while one is under way"
    assert window.depth(0) == 1, "nothing is between the last hop and the loss"
    window.reset(most=4)
    assert window.depth(1) == 3


def test_the_first_of_a_step_shows_the_way_anew():
    """The line became ten times as long meanwhile, and short again: a step later that is known."""
    window = Window()
    for trip in (1.0, 10.0, 1.0):
        for number in range(20):
            window.begun(number, 1, 0.1 * number)
        window.finished(0, trip)
        assert window.depth(1) <= 2 * 20 * trip + 1
        for number in range(1, 20):
            window.finished(number, trip + 0.1 * number)
        window.end_step()
    assert 2 * 10 < window.depth(1) <= 2 * 20 + 1


def test_memory_is_the_limit_and_what_never_returns_is_forgotten():
    window = Window()
    window.reset(most=5)
    for number in range(40):
        window.begun(number, 2, 0.0)
    for number in range(30):
        window.finished(number, 10.0)
    assert window.depth(2) == 5
    window.end_step()
    window.finished(35, 11.0)
    window.finished("unheard of", 11.0)
    assert window.depth(2) == 5


class Line:
    """Stages on lines that carry one bundle at a time, in virtual time."""

    def __init__(self, computing, hop_s, latency_s, windows):
        self.computing, self.hop_s, self.latency_s = computing, hop_s, latency_s
        self.windows = windows
        self.now = 0.0
        self.events = []
        self.order = itertools.count()
        self.free = defaultdict(float)
        """Worker or directed line → when it is idle."""
        self.route = tuple(Hop(str(i), i, i + 1) for i in range(len(computing)))
        self.done = set()

    def step(self, microbatches, adaptive):
        """Seconds of one step."""
        roster = {hop.peer: (hop.begin, hop.end) for hop in self.route}
        self.done.clear()
        self.free.clear()
        began = self.now
        self.stages = [
            Pipeline(str(i), roster, microbatches, 64, self.windows[i].depth if adaptive else shortest)
            for i in range(len(self.computing))
        ]
        for number in range(microbatches):
            self.carry_out(0, self.stages[0].assign(number, self.route, 0))
        while self.events and len(self.done) < microbatches:
            self.now, _, happen = heapq.heappop(self.events)
            happen()
        assert len(self.done) == microbatches
        self.events.clear()
        for window in self.windows:
            window.end_step()
        return self.now - began

    def use(self, what, seconds, extra, happen):
        self.free[what] = max(self.free[what], self.now) + seconds
        heapq.heappush(self.events, (self.free[what] + extra, next(self.order), happen))

    def carry_out(self, at, effects):
        pipeline, window, work = self.stages[at], self.windows[at], self.computing[at]
        last = at == len(self.stages) - 1
        for effect in effects:
            match effect:
                case p.RunForward(key=key, hops_after=hops):
                    window.begun(key, hops, self.now)

                    def forward(key=key):
                        out = None if last else "bundle"
                        self.carry_out(at, pipeline.forward_done(key, out, 1.0 if last else None))

                    self.use(at, work / 3, 0.0, forward)
                case p.RunBackward(key=key):

                    def backward(key=key):
                        window.finished(key, self.now)
                        if at == 0:
                            self.done.add(key.id)
                        self.carry_out(at, pipeline.backward_done(key, "gradient" if at else None))

                    self.use(at, work * 2 / 3, 0.0, backward)
                case p.SendActivation(id=number, route=route, attempt=attempt, handle=handle):

                    def arrive(number=number, route=route, attempt=attempt, handle=handle):
                        there = self.stages[at + 1]
                        self.carry_out(at + 1, there.activation(number, route, attempt, str(at), handle))

                    self.use((at, at + 1), self.hop_s, self.latency_s, arrive)
                case p.SendGradient(id=number, border=border, handle=handle):

                    def back(number=number, border=border, handle=handle):
                        self.carry_out(at - 1, self.stages[at - 1].gradient(number, border, handle))

                    self.use((at, at - 1), self.hop_s, self.latency_s, back)


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
    """DT-FM 3.5: the step is little more than the larger of both sums; what is more is the way of the first and last."""
    work, microbatches = 0.2, 32
    line = Line([work] * stages, hop_s, latency_s, [Window() for _ in range(stages)])
    before = line.step(microbatches, adaptive=False)
    for _ in range(5):
        line.step(microbatches, adaptive=True)
    found = line.step(microbatches, adaptive=True)
    assert found <= bound * microbatches * max(work, hop_s), (before, found)
    assert found * gain <= before, (before, found)
    assert line.windows[0].depth(stages - 1) <= 32
