"""Latency and rate of the line between any two peers, each with an error, from what few measured. Pure.

Latency: half of a measured round trip, or else of the distance of the two coordinates; where one has none, as
between the others.
Rate: what was measured, or else what the uplink of the one and the downlink of the other allow, and no more
than lines like it carry: those between ends that are near its ends, or that are as long. They count by a
weighted median, one vote each, with a vote that nothing but the ends limits it; so no single claim decides.
A line that may carry more than was measured is no vote: it carries at least that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from hetpeer.stages.planning.network_coordinates import LEAST_S, LONGEST_S, Coordinate
from hetpeer.stages.planning.swarms.plan_inputs import LATENCY_S, LINE

Floats = NDArray[np.float64]
RATES = 125.0, 125e9
"""Believed bounds of the rate of a line, bytes/s: no claim may overflow the arithmetic."""
SEVERAL = 2
"""Lines that must agree against what a peer says of its own."""
FULL = 0.8
"""A line that carries this share of what its ends allow is held up by them, not by the way."""
CLOSE = 0.05
"""Distance of two lines within which they are as good as the same line."""
SHARP = 4
"""Power of the distance by which a line counts less."""
APART = 1.0
"""Most that the distance of the ends adds to that of two lines, and where the vote for no limit stands."""
NO_LIMIT = (CLOSE + APART) ** -SHARP
"""Weight of the vote that nothing but its ends limits a line."""
BACK = 0.1
"""Distance of a line and its way back: most ways carry as much in both directions."""
MEASURED, ENDS, UNKNOWN = 0.1, 0.5, 1.0
"""Errors, as shares: of what was measured; of a rate by what the ends say, and of a latency of no source."""
WORST = 4.0
"""Largest error."""
MOST_LINES = 512
"""Measured lines with which others are compared: more are thinned out evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineEnd:
    """A peer, as it says. Rates in bytes/s; 0: not known."""

    uplink: float = 0.0
    downlink: float = 0.0
    coordinate: Coordinate | None = None
    wide: bool = False
    """Whether its own line limits nobody (a front)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLine:
    """Rate and round trip of one line by those who used it."""

    rate: float = 0.0
    """Bytes/s; 0: not known."""
    trip_s: float = 0.0
    """Best round trip in seconds; 0: not known."""
    at_least: bool = False
    """Whether it may carry more than `rate`: what was sent was too short for TCP to become as fast."""


Pair = tuple[int, int]
"""(sender, receiver), by number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLines:
    """Lines of N peers; [i, j] is from i to j. Errors are shares: 0.1 is a tenth."""

    latency: Floats
    """Seconds, one way, (N, N)."""
    latency_error: Floats
    rate: Floats
    """Bytes/s, (N, N)."""
    rate_error: Floats
    measured: NDArray[np.bool_]
    """Whether the rate was measured."""
    up: Floats
    """Bytes/s that leave each, (N,)."""
    down: Floats
    """Bytes/s that reach each, (N,)."""
    together: Floats
    """Bytes/s that all lines of each carry at once, (N,): `up`, or LINE if they share nothing that limits."""

    @property
    def doubt(self) -> Floats:
        """Factor by which each line may be slower, by its error; 1: it was measured, (N, N)."""
        return np.where(self.measured, 1.0, 1.0 + self.rate_error)


def believed(rate: float) -> float:
    """A claimed rate in bytes/s within RATES; 0 (unknown) stays 0."""
    least, most = RATES
    return min(max(rate, least), most) if rate else 0.0


def pair_lines(ends: Sequence[LineEnd], lines: Mapping[Pair, MeasuredLine]) -> PairLines:
    """The lines between all `ends`, by number, from those that were measured.

    pairs = pair_lines([LineEnd(uplink=2e6), LineEnd(uplink=4e6)], {(0, 1): MeasuredLine(rate=1.5e6)})
    pairs.rate[0, 1], pairs.rate[1, 0]  # 1.5e6, and 4e6: no downlink is taken to be slower than the uplink
    """
    carried = {pair: believed(line.rate) for pair, line in lines.items() if line.rate}
    rates = {pair: rate for pair, rate in carried.items() if not lines[pair].at_least}
    latency, latency_error = _latencies(ends, lines)
    up, down = _claims(ends, carried)
    evidence = _Evidence(ends, np.where(latency_error < UNKNOWN, latency, np.nan), rates) if rates else None
    if evidence is not None:
        up, down = _contradicted(evidence, up, down)
    wide = np.array([end.wide for end in ends], dtype=np.bool_)
    up, down = np.where(wide, LINE, up), np.where(wide, LINE, down)
    together = np.where(_unshared(up, carried), LINE, up)
    by_ends = np.minimum(up[:, None], down[None, :])
    rate, error = by_ends, np.full(by_ends.shape, ENDS)
    measured = np.zeros(by_ends.shape, dtype=np.bool_)
    if evidence is not None:
        rate, error = evidence.estimated(by_ends)
        pairs = tuple(np.array(list(rates)).T)
        measured[pairs], rate[pairs], error[pairs] = True, list(rates.values()), MEASURED
    for pair in carried.keys() - rates.keys():
        rate[pair] = max(rate[pair], carried[pair])
    return PairLines(
        latency=latency,
        latency_error=latency_error,
        rate=rate,
        rate_error=error,
        measured=measured,
        up=up,
        down=down,
        together=together,
    )


def _latencies(ends: Sequence[LineEnd], lines: Mapping[Pair, MeasuredLine]) -> tuple[Floats, Floats]:
    """(seconds one way, error) of all pairs."""
    count, known = len(ends), [number for number, end in enumerate(ends) if end.coordinate is not None]
    trips = {pair: min(line.trip_s, LONGEST_S) for pair, line in lines.items() if line.trip_s}
    usual = median(trips.values()) if trips else 2 * LATENCY_S
    trip, error = np.full((count, count), usual), np.full((count, count), UNKNOWN)
    if known:
        points = [c for number in known if (c := ends[number].coordinate) is not None]
        at, height = np.array([c.at for c in points]), np.array([c.height for c in points])
        own = np.array([c.error for c in points])
        there = np.ix_(known, known)
        apart = np.linalg.norm(at[:, None] - at[None, :], axis=2)
        far = np.maximum(apart + height[:, None] + height[None, :], LEAST_S)
        if not trips and len(known) > 1:
            trip[:] = np.median(far[np.triu_indices(len(known), 1)])
        trip[there] = far
        error[there] = np.minimum(np.hypot(own[:, None], own[None, :]), UNKNOWN)
    for (sender, to), trip_s in trips.items():
        trip[sender, to], error[sender, to] = trip_s, MEASURED
        if (to, sender) not in trips:
            trip[to, sender], error[to, sender] = trip_s, MEASURED
    np.fill_diagonal(trip, 0.0)
    return trip / 2, error


def _claims(ends: Sequence[LineEnd], rates: Mapping[Pair, float]) -> tuple[Floats, Floats]:
    """(uplinks, downlinks) as peers say, and no less than any of their lines carried.

    An unknown uplink is as the middle of the known, not as slow as the only line that it was seen on; an
    unknown downlink is no slower than the uplink beside it.
    """
    count = len(ends)
    sent, came = np.zeros(count), np.zeros(count)
    for (sender, to), rate in rates.items():
        sent[sender], came[to] = max(sent[sender], rate), max(came[to], rate)
    said = np.array([believed(end.uplink) for end in ends])
    seen = np.maximum(said, sent)
    known = [rate for rate, end in zip(seen.tolist(), ends, strict=True) if rate and not end.wide]
    usual = median(known) if known else LINE
    up = np.where(said > 0, seen, np.maximum(seen, usual))
    down = np.array([believed(end.downlink) for end in ends])
    return up, np.maximum(np.where(down > 0, down, up), came)


def _unshared(up: Floats, rates: Mapping[Pair, float]) -> NDArray[np.bool_]:
    """Whether the lines of each share no uplink that limits them.

    An uplink is known as the most that several lines carried at once. If that is what two of them carry one
    by one, they did not hold each other up. If one alone carries nearly as much, it may have been the uplink.
    """
    of_peer: dict[int, list[float]] = defaultdict(list)
    for (sender, _), rate in rates.items():
        of_peer[sender].append(rate)
    found = np.zeros(len(up), dtype=np.bool_)
    for peer, own in of_peer.items():
        slowest, limit = sorted(own)[:SEVERAL], FULL * up[peer]
        found[peer] = len(slowest) == SEVERAL and FULL * sum(slowest) <= up[peer] and max(own) < limit
    return found


def _contradicted(evidence: _Evidence, up: Floats, down: Floats) -> tuple[Floats, Floats]:
    """Uplinks and downlinks, less where lines contradict them.

    A line that carries less than half of what its ends and lines like it do is held up at one end. If that is
    so on all lines of a peer, SEVERAL at least, its own line is what holds them up: the fastest says how much
    it carries.
    """
    found_up, found_down = up.copy(), down.copy()
    by_ends = np.minimum(up[evidence.senders], down[evidence.receivers])
    for ends, found in ((evidence.senders, found_up), (evidence.receivers, found_down)):
        of_peer: dict[int, list[int]] = defaultdict(list)
        for line, peer in enumerate(ends.tolist()):
            of_peer[peer].append(line)
        for peer, own in of_peer.items():
            if len(own) < SEVERAL:
                continue
            expected = evidence.voted(own, by_ends, without=ends == peer)
            if (2 * evidence.rates[own] < expected).all():
                found[peer] = evidence.rates[own].max()
    return found_up, found_down


class _Evidence:
    """Measured lines, and how near to any pair they are."""

    def __init__(self, ends: Sequence[LineEnd], latency: Floats, rates: Mapping[Pair, float]) -> None:
        """`latency`: seconds one way, (N, N); NaN: nobody knows."""
        chosen = sorted(rates)[:: len(rates) // MOST_LINES + 1]
        self.senders, self.receivers = (np.array(side) for side in zip(*chosen, strict=True))
        self.rates = np.array([rates[pair] for pair in chosen])
        self._trip = np.maximum(2 * latency, LEAST_S)
        unknown = [end.coordinate is None for end in ends]
        at = np.array([(0.0,) * 3 if end.coordinate is None else end.coordinate.at for end in ends])
        self._apart = np.linalg.norm(at[:, None] - at[None, :], axis=2)
        self._apart[unknown, :] = self._apart[:, unknown] = np.inf  # near nobody
        np.fill_diagonal(self._apart, 0.0)

    def estimated(self, by_ends: Floats) -> tuple[Floats, Floats]:
        """(bytes/s, error) of all pairs, of which the ends allow `by_ends`."""
        rate, error = by_ends.copy(), np.zeros(by_ends.shape)
        by_lines = by_ends[self.senders, self.receivers]
        off = self._off(by_lines)
        for sender in range(len(by_ends)):
            weights = self._weights(np.full(len(by_ends), sender), np.arange(len(by_ends)))
            rate[sender] = self._median(weights, by_lines, by_ends[sender])
            total = weights.sum(axis=1) + NO_LIMIT
            logs = (weights @ off + NO_LIMIT * np.log1p(ENDS)) / total
            error[sender] = np.minimum(np.expm1(logs), WORST)
        return rate, error

    def voted(self, lines: Sequence[int], by_lines: Floats, *, without: NDArray[np.bool_]) -> Floats:
        """Bytes/s for the measured `lines`, by all lines but those `without`; ends allow `by_lines`."""
        weights = self._weights(self.senders[lines], self.receivers[lines]) * ~without
        return self._median(weights, by_lines, by_lines[lines])

    def _off(self, by_lines: Floats) -> Floats:
        """Error of each measured line, had it been estimated: |ln(estimate / rate)|."""
        weights = self._weights(self.senders, self.receivers)
        a, b = self.senders, self.receivers
        same = (a[:, None] == a[None, :]) & (b[:, None] == b[None, :])
        back = (a[:, None] == b[None, :]) & (b[:, None] == a[None, :])
        found = self._median(weights * ~(same | back), by_lines, by_lines)
        off: Floats = np.abs(np.log(found / self.rates))
        return off

    def _weights(self, senders: NDArray[np.intp], receivers: NDArray[np.intp]) -> Floats:
        """[p, l]: how much the measured line l says of the pair p."""
        trip = self._trip[senders, receivers][:, None]
        ways = self._apart[np.ix_(senders, self.senders)] + self._apart[np.ix_(receivers, self.receivers)]
        back = self._apart[np.ix_(senders, self.receivers)] + self._apart[np.ix_(receivers, self.senders)]
        longer = np.abs(np.log(trip / self._trip[self.senders, self.receivers][None, :]))
        distance = np.minimum(np.minimum(ways / trip, BACK + back / trip), APART) + longer
        # lines of unknown length are like no other
        weights: Floats = (CLOSE + np.nan_to_num(distance, nan=np.inf)) ** -SHARP
        return weights

    def _median(self, weights: Floats, by_lines: Floats, by_ends: Floats) -> Floats:
        """Weighted median of what the way carries, and no more than `by_ends`."""
        way = np.where(self.rates < FULL * by_lines, self.rates, np.inf)
        order = np.argsort(way)
        votes = np.cumsum(weights[:, order], axis=1)
        half = (votes[:, -1:] + NO_LIMIT) / 2
        place = (votes <= half).sum(axis=1)  # beyond the last: no limit
        limits = np.append(way[order], np.inf)[place]
        least: Floats = np.minimum(by_ends, limits)
        return least
