"""Two other ways of training under churn, at their best, under the same departures.

Fluid models: work is divisible, spreads perfectly over whoever is there, and nothing but lost work costs
time. Both see a death at once and pay nothing for coordination, so what hetpeer's own cores are measured
against, event by event, is flattering to the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """`peer` is away from `at` until `back`, in seconds."""

    peer: str
    at: float
    back: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Speeds of the devices at each stage: microbatches (forward and backward of that stage) a second."""

    stages: Sequence[Mapping[str, float]]
    microbatches: int
    fill_s: float
    """Until the first microbatch is through all stages and back; nothing is done for the next step
    meanwhile.
    """
    rejoin_s: float
    """Until one who is back has the state."""

    def flow(self, away: set[str]) -> float:
        """Microbatches a second through all stages without those who are away."""
        return min(sum(rate for peer, rate in stage.items() if peer not in away) for stage in self.stages)


class _Clock:
    """Departures and returns in the order of time."""

    def __init__(self, departures: Sequence[Departure], rejoin_s: float) -> None:
        moments = [(d.at, 0, d.peer) for d in departures] + [
            (d.back + rejoin_s, 1, d.peer) for d in departures
        ]
        self._moments = moments
        heapq.heapify(self._moments)
        self.now = 0.0
        self.away: set[str] = set()

    def next(self, until: float) -> str | None:
        """Go to `until`, or to what happens before: who has died then; empty for one who is back, None at
        `until`.
        """
        if not self._moments or self._moments[0][0] > until:
            self.now = until
            return None
        self.now, returns, peer = heapq.heappop(self._moments)
        if returns:
            self.away.discard(peer)
            return ""
        if peer in self.away:
            return ""
        self.away.add(peer)
        return peer

    @property
    def exhausted(self) -> bool:
        return not self._moments


def losing_work(fleet: Fleet, departures: Sequence[Departure], steps: int, checkpoint_every: int) -> float:
    """Seconds for `steps` steps where what a dead peer had accumulated is lost, and other microbatches
    make up for it.

    As in SWARM (arXiv 2301.11913): a microbatch that makes up for one that was lost at one stage passes all
    of them. A stage that loses its last peer loses its parameters: all go back to the last checkpoint.
    """
    clock = _Clock(departures, fleet.rejoin_s)
    done = 0
    while done < steps:
        kept = _making_up(fleet, clock)
        if kept is None:
            return float("inf")
        done = done + 1 if kept else done - done % checkpoint_every
    return clock.now


def waiting(fleet: Fleet, departures: Sequence[Departure], until: float) -> float:
    """Steps by `until` where lost work is made up for as in `losing_work`, and a stage without peers waits
    for one with its parameters: nothing else is lost.
    """
    clock, done = _Clock(departures, fleet.rejoin_s), 0
    while True:
        began = clock.now
        if _making_up(fleet, clock, waits=True) is None:
            return float(done)
        if clock.now >= until:
            return done + (until - began) / (clock.now - began)
        done += 1


def _making_up(fleet: Fleet, clock: _Clock, *, waits: bool = False) -> bool | None:
    """One step; False if a stage lost its last peer and nobody `waits`, None if nobody ever comes back."""
    passed, lost = 0.0, [0.0] * len(fleet.stages)
    accumulated: dict[str, float] = {}
    _wait(clock, clock.now + fleet.fill_s)
    while passed < (target := fleet.microbatches + max(lost)):
        flow, began, away = fleet.flow(clock.away), clock.now, set(clock.away)
        if not flow and clock.exhausted:
            return None
        dead = clock.next(began + (target - passed) / flow if flow else float("inf"))
        done = flow * (clock.now - began)
        passed = target if dead is None else passed + done
        for stage in fleet.stages:
            here = {peer: rate for peer, rate in stage.items() if peer not in away}
            for peer, rate in here.items():
                accumulated[peer] = accumulated.get(peer, 0.0) + done * rate / sum(here.values())
        if dead:
            number = next(n for n, stage in enumerate(fleet.stages) if dead in stage)
            lost[number] += accumulated.pop(dead, 0.0)
            if not waits and clock.away.issuperset(fleet.stages[number]):
                return False
    return True


def restarting(
    fleet: Fleet, departures: Sequence[Departure], steps: int, checkpoint_every: int, restart_s: float
) -> float:
    """Seconds for `steps` steps where every death takes all back to the last checkpoint; after `restart_s`
    those who are left go on.
    """
    clock = _Clock(departures, fleet.rejoin_s)
    done = 0
    while done < steps:
        if _undisturbed(fleet, clock):
            done += 1
        elif clock.exhausted and not fleet.flow(clock.away):
            return float("inf")
        else:
            done -= done % checkpoint_every
            _wait(clock, clock.now + restart_s)
    return clock.now


def _undisturbed(fleet: Fleet, clock: _Clock) -> bool:
    """One step, unless somebody dies before it is done."""
    full = clock.now + fleet.fill_s
    while (dead := clock.next(full)) is not None:
        if dead:
            return False
    passed = 0.0
    while passed < fleet.microbatches:
        flow, began = fleet.flow(clock.away), clock.now
        if not flow and clock.exhausted:
            return False
        dead = clock.next(began + (fleet.microbatches - passed) / flow if flow else float("inf"))
        if dead is None:
            return True
        if dead:
            return False
        passed += flow * (clock.now - began)
    return True


def _wait(clock: _Clock, until: float) -> None:
    while clock.next(until) is not None:
        pass
