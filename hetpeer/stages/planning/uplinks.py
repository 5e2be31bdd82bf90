"""What a peer sends in virtual time: its lines share its uplink, and each carries one bundle after the other. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hetpeer.stages.planning.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """The way from one peer to another."""

    rate: float
    """Bytes/s that it carries alone."""
    delay_s: float = 0.0
    """One way."""
    activation_bytes: float = 0.0
    """Of a microbatch's bundle, as it is written for this line."""
    gradient_bytes: float = 0.0
    sums_bytes: float = 0.0
    """Of a whole step: parts of gradients, and what they add up to."""


@dataclass(slots=True)
class _Bundle:
    left: float
    arrives: Callable[[], None]


class Uplink:
    """The lines of one peer. `capacity` in bytes/s is what they carry together; they share it as evenly as their own rates
    let them (max-min fairness), which is what TCP comes to. `places` say which of equally fast ones comes first (None: as in `lines`): what they get differs by rounding.
    """

    def __init__(
        self,
        timeline: Timeline,
        capacity: float,
        lines: Mapping[str, PeerLink],
        places: Mapping[str, int] | None = None,
    ) -> None:
        self._busy_s = 0.0
        self._timeline = timeline
        self._capacity = capacity
        self._lines = lines
        self._places = {to: place for place, to in enumerate(lines)} if places is None else places
        self._queues: defaultdict[str, deque[_Bundle]] = defaultdict(deque)
        self._shares: dict[str, float] = {}
        self._since = 0.0
        self._turn = 0

    @property
    def busy_s(self) -> float:
        """Seconds so far in which anything was sent."""
        return self._busy_s + (self._timeline.now - self._since if self._shares else 0.0)

    def send(self, to: str, nbytes: float, arrives: Callable[[], None]) -> None:
        """Queue a bundle for `to`; `arrives` happens when its last byte is there."""
        self.send_all({to: nbytes}, arrives)

    def send_all(self, bundles: Mapping[str, float], arrives: Callable[[], None]) -> None:
        """Queue a bundle of so many bytes for each of several at the same time: the uplink is divided once."""
        self._move()
        for to, nbytes in bundles.items():
            self._queues[to].append(_Bundle(nbytes, arrives))
        self._share()

    def _move(self) -> None:
        """What has left since the last look."""
        passed, self._since = self._timeline.now - self._since, self._timeline.now
        if self._shares:
            self._busy_s += passed
        for to, share in self._shares.items():
            self._queues[to][0].left -= share * passed

    def _share(self) -> None:
        """Divide the uplink among the lines in use, and come again when the first of their bundles has left."""
        self._turn += 1
        left = self._capacity
        using = sorted(
            (to for to, queue in self._queues.items() if queue),
            key=lambda to: (self._lines[to].rate, self._places[to]),
        )
        self._shares = {}
        for number, to in enumerate(using):
            self._shares[to] = min(self._lines[to].rate, left / (len(using) - number))
            left -= self._shares[to]
        if using:
            turn = self._turn
            soonest, to = min((self._queues[to][0].left / share, to) for to, share in self._shares.items())
            self._timeline.after(max(soonest, 0.0), lambda: self._sent(turn, to))

    def _sent(self, turn: int, to: str) -> None:
        if turn != self._turn:  # something else began meanwhile
            return
        self._move()
        # Shares of a sum are often equally large, and all gone at the same time.
        gone = [other for other in self._shares if other != to and self._queues[other][0].left <= 0.0]
        for receiver in (to, *gone):
            bundle = self._queues[receiver].popleft()
            self._timeline.after(self._lines[receiver].delay_s, bundle.arrives)
        self._share()
