"""A step in virtual time: the pipeline cores that the volunteers run, on workers and lines that take the time they were
measured to take. Pure.

Nothing of the schedule is modelled: `Pipeline` and `Window` are the real ones (stages/execution). What is left out are lost
peers, full memory and the coordinator: a sealed slot is counted at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from hetpeer.stages.execution import effects as p
from hetpeer.stages.execution.bench import Bench
from hetpeer.stages.execution.pipeline import Pipeline
from hetpeer.stages.execution.routes import Route
from hetpeer.stages.execution.window import MOST, Window
from hetpeer.stages.planning.timeline import Timeline
from hetpeer.stages.planning.uplinks import Line, Uplink

STEP = 0
"""One runs at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One volunteer's worker and its way out."""

    forward_s: float
    """Of one microbatch over its blocks."""
    backward_s: float
    uplink: float = math.inf
    """Bytes/s of all its lines together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step took, in seconds."""

    seconds: float
    computing: Mapping[str, float]
    """Peer → its worker was busy for so long."""
    sending: Mapping[str, float]
    """Peer → its uplink was busy for so long."""


class VirtualSwarm:
    """Volunteers that take `routes` (microbatch → its way) in every step. `lines` are keyed (from, to): each two peers that
    follow one another on a route need both ways. `most` microbatches have room in a volunteer's memory.
    """

    def __init__(
        self,
        machines: Mapping[str, Machine],
        lines: Mapping[tuple[str, str], Line],
        routes: Mapping[int, Route],
        most: int = MOST,
    ) -> None:
        self.windows = {peer: Window(most) for peer in machines}
        """Peer → what it has learned of its way there and back."""
        self._machines = machines
        self._lines = lines
        self._routes = routes

    def step(self) -> Step:
        """One step. The windows remember it for the next, as they do in life."""
        found = _Running(self._machines, self._lines, self._routes, self.windows).run()
        for window in self.windows.values():
            window.end_step(STEP)
        return found


class _Running:
    """One step under way."""

    def __init__(
        self,
        machines: Mapping[str, Machine],
        lines: Mapping[tuple[str, str], Line],
        routes: Mapping[int, Route],
        windows: Mapping[str, Window],
    ) -> None:
        roster = {hop.peer: (hop.begin, hop.end) for route in routes.values() for hop in route}
        self._machines, self._routes, self._windows = machines, routes, windows
        self._timeline = Timeline()
        self._cores = {
            peer: Pipeline(peer, roster, len(routes), len(routes), Bench(windows[peer].depth))
            for peer in roster
        }
        self._uplinks = {
            peer: Uplink(
                self._timeline,
                machines[peer].uplink,
                {to: line for (sender, to), line in lines.items() if sender == peer},
            )
            for peer in roster
        }
        self._lines = lines
        self._idle_from = dict.fromkeys(roster, 0.0)
        self._computing = dict.fromkeys(roster, 0.0)
        self._done = 0

    def run(self) -> Step:
        for number, route in self._routes.items():
            first = route[0].peer
            self._carry_out(first, self._cores[first].assign(number, route, 0))
        self._timeline.run(lambda: self._done == len(self._routes))
        return Step(
            seconds=self._timeline.now,
            computing=self._computing,
            sending={peer: uplink.busy_s for peer, uplink in self._uplinks.items()},
        )

    def _carry_out(self, peer: str, effects: Iterable[p.Effect]) -> None:
        for effect in effects:
            match effect:
                case p.RunForward():
                    self._forward(peer, effect)
                case p.RunBackward():
                    self._backward(peer, effect)
                case p.SendActivation():
                    self._send_activation(peer, effect)
                case p.SendGradient():
                    self._send_gradient(peer, effect)
                case p.ReportSealed(slot=slot):
                    self._timeline.after(0.0, partial(self._counted, peer, slot))

    def _counted(self, peer: str, slot: int) -> None:
        self._carry_out(peer, self._cores[peer].settled(slot, ()))

    def _compute(self, peer: str, seconds: float, done: Callable[[], None]) -> None:
        """The worker does one thing after the other."""
        now = self._timeline.now
        self._idle_from[peer] = max(self._idle_from[peer], now) + seconds
        self._computing[peer] += seconds
        self._timeline.after(self._idle_from[peer] - now, done)

    def _forward(self, peer: str, work: p.RunForward) -> None:
        key, last = work.key, not work.hops_after
        self._windows[peer].begun((STEP, key), work.hops_after, self._timeline.now)

        def done() -> None:
            core = self._cores[peer]
            self._carry_out(peer, core.forward_done(key, None if last else key, 0.0 if last else None))

        self._compute(peer, self._machines[peer].forward_s, done)

    def _backward(self, peer: str, work: p.RunBackward) -> None:
        key = work.key

        def done() -> None:
            self._windows[peer].finished((STEP, key), self._timeline.now)
            self._done += not key.begin
            self._carry_out(peer, self._cores[peer].backward_done(key, key if key.begin else None))

        self._compute(peer, self._machines[peer].backward_s, done)

    def _send_activation(self, peer: str, what: p.SendActivation) -> None:
        to = what.route[0].peer

        def arrives() -> None:
            core = self._cores[to]
            self._carry_out(to, core.activation(what.id, what.route, what.attempt, peer, what.handle))

        self._uplinks[peer].send(to, self._lines[peer, to].activation_bytes, arrives)

    def _send_gradient(self, peer: str, what: p.SendGradient) -> None:
        def arrives() -> None:
            self._carry_out(what.to, self._cores[what.to].gradient(what.id, what.border, what.handle))

        self._uplinks[peer].send(what.to, self._lines[peer, what.to].gradient_bytes, arrives)
