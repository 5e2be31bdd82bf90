"""One direction of a probe: who gets the next bytes, and the rate of the line from when they arrive. Pure.

Bytes go to several peers at once, so that the newcomer's own line is the narrowest part of the way. Each peer
has a window of bytes under way. It grows with each arrival, as that of TCP in its slow start, and is never
worth more than twice QUEUE_S and a round trip at the best rate of the peer so far. So a slow line loses
little in its queue, and is free soon after the probe.

Whoever is ready takes the next bytes. The rate is that of the later arrivals, since the first ones show TCP's
slow start. It ends when the first peer has no more under way, because the others may be on slow lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from statistics import fmean, pstdev

LEAST_PIECE, MOST_PIECE = 1 << 11, 1 << 15
"""Bytes that are sent at a time."""
FIRST_PIECE = 1 << 12
PIECE_S = 0.02
"""Seconds of the rate so far that one piece is worth."""
FIRST_WINDOW = 1 << 14
"""Bytes under way to a peer at first, as in TCP (RFC 6928: ten packets)."""
NEAR_S, MOST_WINDOWS = 0.025, 4
"""Seconds of a round trip for which that is meant. A longer one has more, up to as many times as much: there
are fewer round trips to grow in.
"""
QUEUE_S = 0.05
"""Seconds besides a round trip by which the bytes under way to a peer are measured."""
ENOUGH_BYTES, ENOUGH_S = 1 << 15, 0.4
"""A rate has as many bytes behind it, or, on a slow line, as many seconds."""
LEAST_S = 0.004
"""And as many seconds in any case."""
CUTS = (0.25, 0.375, 0.5)
"""Shares of the arrivals of which one is left out as slow start: that which leaves the highest rate."""
PAUSE_S = 0.01
"""Seconds without an arrival that may be a pause of our processor."""
LONG_S = 0.5
"""Seconds of counted arrivals beside which slow start is short: no more of them are left out."""
FAR_S = 0.1
"""Seconds of a round trip over which a probe has too few of them to grow in."""
MOST_ERROR = 0.25
"""A rate over such ways with a larger error is unknown: it still rose, is too low by any factor, and a
planner has a better guess. Over short ways it is not far off.
"""
PARTS = 4
"""Parts of the counted arrivals whose rates are compared for the error."""
JITTER_S = 0.002
"""Seconds by which an arrival is noticed late: wake-ups, and acknowledgements that travel together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRate:
    """A measured rate.

    LineRate(rate=2.5e6, error=0.1)  # 20 Mbit/s, and probably no more than a tenth beside it
    """

    rate: float = 0.0
    """Bytes/s; 0: unknown."""
    error: float = 0.0
    """Standard error as a share of the rate, or half of what it still rose by if that is more; 1 at most."""


UNKNOWN = LineRate()


def line_rate(arrivals: Iterable[tuple[float, int]], trip_s: float = 0.0) -> LineRate:
    """The rate of a line on which bytes arrived at these (seconds of one clock, bytes); UNKNOWN if too
    few, or if the peers are far away and its error is above MOST_ERROR.

    The first bytes only set the beginning of the time. `trip_s`: the shortest round trip. If it is longer
    than FAR_S, windows grow for most of a probe; then the error is large unless many round trips counted.

        line_rate([(0.0, 65536), (0.1, 65536), (0.2, 65536)]).rate  # 655360.0
    """
    series = sorted(arrivals)
    sums = list(accumulate(nbytes for _, nbytes in series))
    best, counted = 0.0, series[:0]
    for cut in CUTS:
        if counted and counted[-1][0] - counted[0][0] >= LONG_S:
            break
        first = next((i for i, so_far in enumerate(sums) if so_far >= cut * sums[-1]), len(series))
        rest = series[_before_pause(series, first) :]
        if (rate := _rate(rest)) > best:
            best, counted = rate, rest
    if not best:
        return UNKNOWN
    error = _error(counted)
    if trip_s > FAR_S:
        error = max(error, trip_s / (counted[-1][0] - counted[0][0]))
        if error > MOST_ERROR:
            return UNKNOWN
    return LineRate(rate=best, error=error)


def _before_pause(series: Sequence[tuple[float, int]], first: int) -> int:
    """Where to begin instead of at `first` if a pause lies just before it.

    What came while the processor was busy is noticed all together after it; without the pause it would have
    taken no time.
    """
    for late in range(min(first, len(series) - 1), 0, -1):
        if series[late][0] - series[late - 1][0] >= PAUSE_S:
            return late - 1
        if series[first][0] - series[late][0] > PAUSE_S:
            break
    return first


def _rate(series: Sequence[tuple[float, int]]) -> float:
    """Bytes/s after the first arrival; 0 without enough bytes or time."""
    if not series:
        return 0.0
    seconds, nbytes = series[-1][0] - series[0][0], sum(nbytes for _, nbytes in series[1:])
    if seconds < LEAST_S or (nbytes < ENOUGH_BYTES and seconds < ENOUGH_S):
        return 0.0
    return nbytes / seconds


def _error(series: Sequence[tuple[float, int]]) -> float:
    """Error of the rate of `series` as a share of it: how much PARTS equally long parts of it differ."""
    begin, end = series[0][0], series[-1][0]
    edges = [begin + (end - begin) * part / PARTS for part in range(PARTS + 1)]
    parts = [sum(n for at, n in series[1:] if low < at <= high) for low, high in pairwise(edges)]
    half = PARTS // 2
    before, after = sum(parts[:half]), sum(parts[half:])
    rising = after / before - 1.0 if before else 1.0
    spread = pstdev(parts) / fmean(parts) / PARTS**0.5 if any(parts) else 1.0
    return min(max(spread, rising / 2) + JITTER_S / (end - begin), 1.0)


class OneWay:
    """One direction of a probe over the peers in `trips` (peer → round trip in seconds), of `nbytes` at most,
    until `end` (seconds of any one clock).

    way = OneWay({"QmReliable": 0.02, "QmAda": 0.05}, nbytes=2_000_000, end=now + 1.0)
    while (size := way.piece(peer, now)):
        way.sent(peer, size)  # and then `arrived` for each, or `lost` once
    way.measured().rate
    """

    def __init__(self, trips: Mapping[str, float], nbytes: int, end: float) -> None:
        self.left = nbytes
        """Bytes that may still be sent."""
        self.end = end
        self.waiting = dict.fromkeys(trips, 0)
        """Peer → bytes under way."""
        self._trips = trips
        self._windows = {
            peer: int(FIRST_WINDOW * min(max(trip / NEAR_S, 1.0), MOST_WINDOWS))
            for peer, trip in trips.items()
        }
        self._arrivals: dict[str, list[tuple[float, int]]] = {peer: [] for peer in trips}
        self._best = dict.fromkeys(self.waiting, 0.0)
        """Peer → the best of its rates so far; 0: not known."""
        self._dry_at = math.inf
        """When the first peer had no more under way, and there was nothing left for it."""
        self.nbytes = 0
        """Bytes that have arrived."""

    def piece(self, peer: str, now: float) -> int:
        """Bytes to send to `peer` at `now`; 0: none now."""
        if now >= self.end or peer not in self.waiting:
            return 0
        rate = self._best[peer] = max(self._best[peer], _late_rate(self._arrivals[peer], self._trips[peer]))
        size = min(max(int(rate * PIECE_S), LEAST_PIECE), MOST_PIECE) if rate else FIRST_PIECE
        window = self._windows[peer]
        if rate:
            window = min(window, max(int(2 * rate * (QUEUE_S + self._trips[peer])), 2 * size))
        size = min(size, self.left)
        return size if self.waiting[peer] + size <= window else 0

    def sent(self, peer: str, nbytes: int) -> None:
        """`nbytes` are on their way to `peer`, or asked of it."""
        self.waiting[peer] += nbytes
        self.left -= nbytes

    def arrived(self, peer: str, nbytes: int, now: float) -> None:
        """As many bytes of `peer`'s have arrived, or are acknowledged."""
        nbytes = min(nbytes, self.waiting.get(peer, 0))
        if nbytes:
            self.waiting[peer] -= nbytes
            self._windows[peer] += nbytes
            self._arrivals[peer].append((now, nbytes))
            self.nbytes += nbytes
            if not (self.left or self.waiting[peer]):
                self._dry_at = min(self._dry_at, now)

    def lost(self, peer: str) -> None:
        """`peer` is gone, with what was under way to it."""
        self.waiting.pop(peer, None)

    def over(self, now: float) -> bool:
        """Whether nothing more is to come that counts."""
        return now >= self.end or not self.waiting or not (self.left or any(self.waiting.values()))

    def measured(self) -> LineRate:
        """The rate by all arrivals until the first peer had no more under way."""
        every = chain.from_iterable(self._arrivals.values())
        until_dry = (one for one in every if one[0] <= self._dry_at)
        return line_rate(until_dry, min(self._trips.values(), default=0.0))


def _late_rate(arrivals: Sequence[tuple[float, int]], trip_s: float) -> float:
    """Bytes/s of the later half of `arrivals`, over a round trip at least; 0 if there are fewer than four."""
    late = arrivals[len(arrivals) // 2 :]
    if len(arrivals) < 4:
        return 0.0
    return sum(nbytes for _, nbytes in late[1:]) / max(late[-1][0] - late[0][0], trip_s, LEAST_S)
