"""Steps in virtual time: the volunteers' pipeline cores, on workers and links with measured times. Pure.

The schedule is not modelled: `Pipeline`, `WorkerQueue` and `InFlightWindow` are the real ones
(stages/pipeline), of one step or of several that overlap (docs/asynchronous.md). The time between the last
work of a step and its update is a measured constant, which other steps may use; workers and links are busy
with the reduce and the update meanwhile. Left out are lost peers, full memory and the coordinator: a sealed
slot counts at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from zlib import crc32

from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.delays import Delays
from hetpeer.stages.pipeline.pipeline import Pipeline
from hetpeer.stages.pipeline.routes import Route
from hetpeer.stages.pipeline.schedule_1f1b import MOST, InFlightWindow, WorkerQueue
from hetpeer.stages.planning.uplinks import PeerLink, Timeline, Uplink

MOST_VARIES = 1.0
"""Largest variation used: beyond it one long pause among a few dozen says little; adverts are claims, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualVolunteer:
    """Times of one volunteer's worker, and its uplink."""

    forward_s: float
    """Seconds of one microbatch over its blocks."""
    backward_s: float
    varies: float = 0.0
    """Standard deviation over mean of single microbatches. A pipeline waits for the slowest."""
    update_s: float = 0.0
    """Seconds of a step's work on sums and update."""
    uplink: float = math.inf
    """Bytes/s of all its links together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualStep:
    """A step: from the end of one step to the end of the next, in seconds."""

    seconds: float
    computing: Mapping[str, float]
    """Peer → seconds in which its worker was busy."""
    sending: Mapping[str, float]
    """Peer → seconds in which its uplink was busy."""


class VirtualSwarm:
    """Volunteers that take `routes` (microbatch → route) in every step.

    `links` are keyed (from, to): two peers that follow one another on a route need both directions, peers
    that reduce together the links to each other. `most` microbatches fit into a volunteer's memory. Up to
    `staleness` steps begin before the one that they follow is over; `delays` says which versions they are
    computed with (None: the one that they are begun with). A step is over when its sums have arrived, but not
    before `between_s` after its last work and after the end of the step before.
    """

    def __init__(
        self,
        machines: Mapping[str, VirtualVolunteer],
        links: Mapping[tuple[str, str], PeerLink],
        routes: Mapping[int, Route],
        most: int = MOST,
        *,
        staleness: int = 0,
        delays: Delays | None = None,
        between_s: float = 0.0,
    ) -> None:
        self._roster = {hop.peer: (hop.begin, hop.end) for route in routes.values() for hop in route}
        self.windows = {peer: InFlightWindow(most) for peer in self._roster}
        """Peer → its window, with what it has learned of the round trip."""
        self._machines = machines
        self._links = links
        self._routes = routes
        self._staleness = staleness
        self._delays = delays
        self._between_s = between_s
        self._timeline = Timeline()
        self._queues = {peer: WorkerQueue(window) for peer, window in self.windows.items()}
        self._workers = {peer: _Worker(self._timeline) for peer in self._roster}
        self._factors = {peer: _factors(peer, machines[peer].varies) for peer in self._roster}
        ways: dict[str, dict[str, PeerLink]] = {peer: {} for peer in self._roster}
        for (sender, to), link in links.items():
            if sender in ways:
                ways[sender][to] = link
        self._uplinks = {
            peer: Uplink(self._timeline, machines[peer].uplink, own) for peer, own in ways.items()
        }
        self._sums = {
            peer: sums
            for peer, own in ways.items()
            if (sums := {to: link.sums_bytes for to, link in own.items() if link.sums_bytes})
        }
        """Sender → to → bytes of a step's reduce."""
        self._steps: list[_UnderWay] = []
        """Steps under way, oldest first: the first is the next to end."""
        self._opened = self._over = 0

    def step(self) -> VirtualStep:
        """Run until one more step is over. The windows remember it for the next, as in a real run."""
        if not self._opened:
            self._open()
        before, over = self._busy(), self._over + 1
        self._timeline.run(lambda: self._over == over)
        after = self._busy()
        return VirtualStep(
            seconds=after.seconds - before.seconds,
            computing={peer: busy - before.computing[peer] for peer, busy in after.computing.items()},
            sending={peer: busy - before.sending[peer] for peer, busy in after.sending.items()},
        )

    def _busy(self) -> VirtualStep:
        """Totals from the beginning until now."""
        return VirtualStep(
            seconds=self._timeline.now,
            computing={peer: worker.busy_s for peer, worker in self._workers.items()},
            sending={peer: uplink.busy_s for peer, uplink in self._uplinks.items()},
        )

    # ── steps begin and end ────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> None:
        """Open as many steps as may be under way."""
        while len(self._steps) <= self._staleness:
            count, behind = len(self._routes), len(self._steps)
            cores = {
                peer: Pipeline(peer, self._roster, count, count, self._queues[peer], behind, self._delays)
                for peer in self._roster
            }
            step = _UnderWay(self._opened, cores, count)
            self._opened += 1
            self._steps.append(step)
            for number, route in self._routes.items():
                first = route[0].peer
                self._happened(step, first, cores[first].assign(number, route, 0))

    def _decide(self) -> None:
        """Begin the first step's reduce and update if it has no work left; steps end in order."""
        first = self._steps[0]
        if first.left or first.awaited:
            return
        first.awaited = sum(map(len, self._sums.values())) + 1
        for peer, worker in self._workers.items():
            worker.do(self._machines[peer].update_s)
        for sender, sums in self._sums.items():
            self._uplinks[sender].send_all(sums, self._nearer)
        self._timeline.after(self._between_s, self._nearer)

    def _nearer(self) -> None:
        """One thing less to wait for at the end of the first step."""
        self._steps[0].awaited -= 1
        if not self._steps[0].awaited:
            self._end()

    def _end(self) -> None:
        """End the first step; another one may begin."""
        step = self._steps.pop(0)
        self._over += 1
        for peer, core in step.cores.items():
            core.schedule.leave()
            self.windows[peer].end_step(step.number)
        for missing, younger in enumerate(self._steps if self._delays else ()):
            for peer, core in younger.cores.items():
                self._happened(younger, peer, core.advance(missing))
        self._open()
        self._decide()

    # ── at a volunteer ─────────────────────────────────────────────────────────────────────────────────────

    def _happened(self, step: _UnderWay, peer: str, effects: Iterable[p.Effect]) -> None:
        """Carry out the step's effects, and those of other steps that share the worker."""
        self._carry_out(step, peer, effects)
        for turn in self._queues[peer].turns():
            other = next(one for one in self._steps if one.cores[peer].schedule is turn)
            self._carry_out(other, peer, other.cores[peer].dispatch())

    def _carry_out(self, step: _UnderWay, peer: str, effects: Iterable[p.Effect]) -> None:
        """Carry out effects of `peer`'s pipeline core in virtual time."""
        for effect in effects:
            match effect:
                case p.RunForward():
                    self._forward(step, peer, effect)
                case p.RunBackward():
                    self._backward(step, peer, effect)
                case p.SendActivation():
                    self._send_activation(step, peer, effect)
                case p.SendGradient():
                    self._send_gradient(step, peer, effect)
                case p.ReportSealed(slot=slot):
                    self._timeline.after(0.0, partial(self._counted, step, peer, slot))

    def _counted(self, step: _UnderWay, peer: str, slot: int) -> None:
        self._happened(step, peer, step.cores[peer].settled(slot, ()))

    def _forward(self, step: _UnderWay, peer: str, work: p.RunForward) -> None:
        key, last = work.key, not work.hops_after
        self.windows[peer].begun((step.number, key), work.hops_after, self._timeline.now)

        def done() -> None:
            core = step.cores[peer]
            self._happened(step, peer, core.forward_done(key, None if last else key, 0.0 if last else None))

        self._workers[peer].do(self._machines[peer].forward_s * next(self._factors[peer]), done)

    def _backward(self, step: _UnderWay, peer: str, work: p.RunBackward) -> None:
        """Occupy the worker for a backward, then tell the core."""
        key = work.key

        def done() -> None:
            self.windows[peer].finished((step.number, key), self._timeline.now)
            self._happened(step, peer, step.cores[peer].backward_done(key, key if key.begin else None))
            if not key.begin:
                step.left -= 1
                self._decide()

        self._workers[peer].do(self._machines[peer].backward_s * next(self._factors[peer]), done)

    def _send_activation(self, step: _UnderWay, peer: str, what: p.SendActivation) -> None:
        to = what.route[0].peer

        def arrives() -> None:
            core = step.cores[to]
            self._happened(step, to, core.activation(what.id, what.route, what.attempt, peer, what.handle))

        self._uplinks[peer].send(to, self._links[peer, to].activation_bytes, arrives)

    def _send_gradient(self, step: _UnderWay, peer: str, what: p.SendGradient) -> None:
        def arrives() -> None:
            self._happened(step, what.to, step.cores[what.to].gradient(what.id, what.border, what.handle))

        self._uplinks[peer].send(what.to, self._links[peer, what.to].gradient_bytes, arrives)


def _factors(peer: str, varies: float) -> Iterator[float]:
    """Factors on the mean of each piece of work: lognormal, pseudo-random, the same for the same peer."""
    spread = math.sqrt(math.log1p(min(varies, MOST_VARIES) ** 2))
    state, normal = crc32(peer.encode()), NormalDist(-(spread**2) / 2, spread or 1.0)
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64  # Knuth, MMIX
        yield math.exp(normal.inv_cdf(((state >> 12) + 0.5) / 2**52)) if spread else 1.0


@dataclass(slots=True, eq=False)
class _UnderWay:
    """One step under way."""

    number: int
    cores: Mapping[str, Pipeline]
    left: int
    """Microbatches whose gradient has not come back to their first hop."""
    awaited: int = 0
    """Once nothing is left: sums on their way, plus one for the constant time."""


class _Worker:
    """A worker, which does one thing after the other."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        """The first one is under way."""
        self._busy_s = self._since = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds so far in which it did anything."""
        return self._busy_s + (self._timeline.now - self._since if self._queue else 0.0)

    def do(self, seconds: float, done: Callable[[], None] = lambda: None) -> None:
        """Work for `seconds` after all earlier work; then call `done`."""
        self._queue.append((seconds, done))
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        self._since = self._timeline.now
        self._timeline.after(self._queue[0][0], self._end)

    def _end(self) -> None:
        self._busy_s += self._timeline.now - self._since
        _, done = self._queue.popleft()
        if self._queue:
            self._begin()
        done()
