"""A peer's sending in virtual time: its links share its uplink, and each carries one bundle after the other.

Pure. `Timeline` lets later events happen in order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

TICK_S = 2.0**-32
"""Time unit, a quarter of a nanosecond: sums and differences are exact for days, so durations never drift."""


class Timeline:
    """`now` in seconds from the beginning; it advances as `run` lets events happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        """Schedule `happens` in `seconds`, rounded up to ticks. Simultaneous events keep their order."""
        due = self.now + math.ceil(seconds / TICK_S) * TICK_S
        heapq.heappush(self._events, (due, next(self._order), happens))

    def run(self, until: Callable[[], bool]) -> None:
        """Let events happen until `until()`. Raises RuntimeError if none is left before that."""
        while not until():
            if not self._events:
                raise RuntimeError("nothing is under way any more, and it is not over")
            self.now, _, happens = heapq.heappop(self._events)
            happens()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """The link from one peer to another."""

    rate: float
    """Bytes/s that the link carries alone."""
    delay_s: float = 0.0
    """Seconds one way."""
    activation_bytes: float = 0.0
    """Bytes of a microbatch's bundle, as encoded for this link."""
    gradient_bytes: float = 0.0
    sums_bytes: float = 0.0
    """Bytes of a whole step's reduce: parts of gradients, and their sums."""


@dataclass(slots=True)
class _Bundle:
    left: float
    arrives: Callable[[], None]


class Uplink:
    """The links of one peer, which share `capacity` bytes/s by max-min fairness, as TCP roughly does.

    `places`: order among equally fast links (None: as in `links`); their shares differ by rounding.
    """

    def __init__(
        self,
        timeline: Timeline,
        capacity: float,
        links: Mapping[str, PeerLink],
        places: Mapping[str, int] | None = None,
    ) -> None:
        self._busy_s = 0.0
        self._timeline = timeline
        self._capacity = capacity
        self._links = links
        self._places = {to: place for place, to in enumerate(links)} if places is None else places
        self._queues: defaultdict[str, deque[_Bundle]] = defaultdict(deque)
        self._shares: dict[str, float] = {}
        self._since = 0.0
        self._turn = 0

    @property
    def busy_s(self) -> float:
        """Seconds so far in which anything was sent."""
        return self._busy_s + (self._timeline.now - self._since if self._shares else 0.0)

    def send(self, to: str, nbytes: float, arrives: Callable[[], None]) -> None:
        """Queue a bundle for `to`; `arrives` is called when its last byte is there."""
        self.send_all({to: nbytes}, arrives)

    def send_all(self, bundles: Mapping[str, float], arrives: Callable[[], None]) -> None:
        """Queue a bundle for each of several peers at the same time: the uplink is divided once."""
        self._move()
        for to, nbytes in bundles.items():
            self._queues[to].append(_Bundle(nbytes, arrives))
        self._share()

    def drop(self, to: str) -> None:
        """Forget all bundles for `to`, also the one under way: the link is closed."""
        self._move()
        self._queues.pop(to, None)
        self._share()

    def _move(self) -> None:
        """Account for the bytes sent since the last look."""
        passed, self._since = self._timeline.now - self._since, self._timeline.now
        if self._shares:
            self._busy_s += passed
        for to, share in self._shares.items():
            self._queues[to][0].left -= share * passed

    def _share(self) -> None:
        """Divide the uplink among the links in use, and schedule the end of the first of their bundles."""
        self._turn += 1
        left = self._capacity
        using = sorted(
            (to for to, queue in self._queues.items() if queue),
            key=lambda to: (self._links[to].rate, self._places[to]),
        )
        self._shares = {}
        for number, to in enumerate(using):
            self._shares[to] = min(self._links[to].rate, left / (len(using) - number))
            left -= self._shares[to]
        if using:
            turn = self._turn
            soonest, to = min((self._queues[to][0].left / share, to) for to, share in self._shares.items())
            self._timeline.after(max(soonest, 0.0), lambda: self._sent(turn, to))

    def _sent(self, turn: int, to: str) -> None:
        """The bundle to `to` has left, unless the shares changed since `turn`; begin the next ones."""
        if turn != self._turn:  # something else began meanwhile
            return
        self._move()
        # Shares of a sum are often equally large, and finish at the same time.
        gone = [other for other in self._shares if other != to and self._queues[other][0].left <= 0.0]
        for receiver in (to, *gone):
            bundle = self._queues[receiver].popleft()
            self._timeline.after(self._links[receiver].delay_s, bundle.arrives)
        self._share()
