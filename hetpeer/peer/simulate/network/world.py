"""Virtual time and a virtual network with seeded faults.

One heap of events, one random generator: a seed is a history. Links are what our transport gives: ordered,
and reliable across short breaks (the session replays what was under way), so a cut shows as a delay; a dead
or stopped receiver shows as silence. Nothing here knows the protocol.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Protocol


class World:
    """The clock, the heap and the randomness of one simulated history."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a simulation must be repeatable, not secret
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        """(time, order of entry, action)"""
        self._order = itertools.count()

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Run `action` in `delay` virtual seconds."""
        self.at(self.now + delay, action)

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Run `action` at `time`, after whatever was entered for that time before."""
        heapq.heappush(self._heap, (time, next(self._order), action))

    def run(self, until: float, stop: Callable[[], bool]) -> None:
        """Carry out events until `stop()` holds or it is `until`."""
        while not stop():
            if not self._heap or self._heap[0][0] > until:
                self.now = max(self.now, until)
                return
            self.now, _, action = heapq.heappop(self._heap)
            self.events += 1
            action()


class Carrier(Protocol):
    """Links with a latency and a bandwidth."""

    def latency_s(self, source: str, target: str) -> float | None:
        """Seconds one way; None if it is not known."""

    def send(self, source: str, target: str, nbytes: float, left: Callable[[], None]) -> None:
        """Call `left` when the last byte has left `source`; never if `target` is closed before that."""

    def close(self, peer: str) -> None:
        """Drop what is sent to `peer`, now and from now on: its process has ended."""

    def open(self, peer: str) -> None:
        """Carry what is sent to `peer` from now on: it has a new process."""


class SimNetwork:
    """Ordered links between named ends, with random latency and cuts.

    With a `carrier` tensors take the time that their bytes need.
    """

    def __init__(self, world: World, latency_s: tuple[float, float], carrier: Carrier | None = None) -> None:
        self._world = world
        self._latency_s = latency_s
        self._carrier = carrier
        self._free_at: dict[tuple[str, str], float] = {}
        self._cut_until: dict[frozenset[str], float] = {}

    def send(self, source: str, target: str, deliver: Callable[[], None], nbytes: float = 0.0) -> None:
        """Carry one message, or a tensor of `nbytes`. A link keeps the order."""
        if self._carrier is not None and nbytes and source != target:
            self._carrier.send(source, target, nbytes, lambda: self._pass(source, target, deliver))
        else:
            self._pass(source, target, deliver)

    def _pass(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Deliver after the latency, not before a cut ends, and in order on each link."""
        world = self._world
        known = None if self._carrier is None else self._carrier.latency_s(source, target)
        arrival = world.now + (world.random.uniform(*self._latency_s) if known is None else known)
        cut = self._cut_until.get(frozenset((source, target)), 0.0)
        link = (source, target)
        arrival = max(
            arrival, cut + self._latency_s[0] if cut > world.now else 0.0, self._free_at.get(link, 0.0)
        )
        self._free_at[link] = arrival
        world.at(arrival, deliver)

    def close(self, peer: str) -> None:
        """Drop the tensors that are on their way to `peer`: its process has ended."""
        if self._carrier is not None:
            self._carrier.close(peer)

    def open(self, peer: str) -> None:
        """Carry tensors to the new process of `peer`."""
        if self._carrier is not None:
            self._carrier.open(peer)

    def cut(self, one: str, other: str, seconds: float) -> None:
        """Let nothing pass between the two for `seconds`; messages sent meanwhile arrive afterwards."""
        self._cut_until[frozenset((one, other))] = self._world.now + seconds


class Gate:
    """Entry of a process: events pass at once, or in the same order when the stopped process goes on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open_at = 0.0
        self._draining = False
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def closed(self) -> bool:
        """Whether messages wait at the gate now."""
        return self._world.now < self._open_at

    def close(self, seconds: float) -> None:
        """Stop the process (SIGSTOP) for `seconds`; if two overlap, the longer one counts."""
        self._open_at = max(self._open_at, self._world.now + seconds)
        self._world.after(seconds, self._drain)

    def open(self) -> None:
        """Let everything pass, as the stopped process is killed and nobody receives it."""
        self._open_at = self._world.now
        self._drain()

    def enter(self, action: Callable[[], None]) -> None:
        """Carry out `action` when its turn comes."""
        self._waiting.append(action)
        self._drain()

    def _drain(self) -> None:
        if self._draining:
            return
        self._draining = True
        try:
            while self._waiting and not self.closed:
                self._waiting.popleft()()
        finally:
            self._draining = False
