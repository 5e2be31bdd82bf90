"""A swarm that comes to know its lines, in virtual time: few measure, all pairs are estimated.

All begin at once. Each pings as many peers as a newcomer probes, and one more at random in each round; after
that all move their coordinates by what the others said of theirs. Each has used lines to a few peers at
random. A ping takes up to some tenths longer than the way; rates are found with errors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.networks import network as laboratory_network
from benchmarks.scenarios import networks
from hetpeer.stages.planning.device_network import DeviceNetwork
from hetpeer.stages.planning.network_coordinates import LEAST_S, Coordinate, OwnCoordinate
from hetpeer.stages.planning.pair_lines import LineEnd, MeasuredLine, PairLines, pair_lines
from tests.wanlab.matrix import Matrix

PROBED, USED = 5, 4
"""Peers that a newcomer probes, and lines that each names in its advert."""
PING, RATE, CLAIM = 0.1, 0.05, 0.1
"""Standard deviations: of what a ping takes too long, of a measured rate, and of what a probe finds."""
BIT_S = 1e9 / 8
UNSEEN = ("continents", "last miles")
"""Kinds of networks of which one each was looked at while constants were chosen: other seeds are a test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """Errors of all pairs that nobody measured, as shares of the truth."""

    latency: NDArray[np.float64]
    rate: NDArray[np.float64]
    by_ends: NDArray[np.float64]
    """Errors of rates by the ends alone, as they were assumed before."""
    pings: float
    """Pings of each peer."""

    def medians(self) -> tuple[float, float]:
        """Middle error of latency and of rate."""
        return float(np.median(self.latency)), float(np.median(self.rate))


def after(network: DeviceNetwork, rounds: int, seed: int, *, liars: int = 0) -> Estimated:
    """Estimates after so many rounds. `liars` say in each round that they are somewhere else, and sure."""
    random = np.random.default_rng(seed)
    count = len(network)
    rate = network.bandwidth_gbit_s * BIT_S
    trip = np.maximum(network.latency_s + network.latency_s.T, LEAST_S)
    others = [[j for j in range(count) if j != i] for i in range(count)]
    owns = [OwnCoordinate(str(number)) for number in range(count)]
    honest = np.ones(count, dtype=np.bool_)
    honest[random.permutation(count)[:liars]] = False
    said: list[Coordinate] = [own.coordinate for own in owns]
    pings = 0

    def ping(i: int, j: int) -> None:
        late = min(abs(random.normal(0.0, PING, 2)))
        owns[i].pinged(str(j), float(trip[i, j] * (1.0 + late)), said[j])

    probed = [random.permutation(some)[:PROBED].tolist() for some in others]
    for i, some in enumerate(probed):
        for j in some:
            ping(i, j)
            pings += 1
        owns[i].move()
    said = [own.coordinate for own in owns]
    for _ in range(rounds):
        for i, own in enumerate(owns):
            unmet = [j for j in others[i] if str(j) not in own.met] or others[i]
            ping(i, int(random.choice(unmet)))
            pings += 1
            own.heard({str(j): coordinate for j, coordinate in enumerate(said)})
            own.move()
        said = [own.coordinate if honest[i] else _anywhere(random) for i, own in enumerate(owns)]
    lines = {
        (i, int(j)): MeasuredLine(
            rate=float(rate[i, j] * np.exp(random.normal(0.0, RATE))),
            trip_s=float(trip[i, j]),
        )
        for i in range(count)
        for j in random.permutation(others[i])[: min(USED, count // 4)]
    }
    claims = np.exp(random.normal(0.0, CLAIM, (count, 2)))
    ends = [
        LineEnd(
            uplink=float(rate[i, probed[i]].max() * claims[i, 0]),
            downlink=float(rate[probed[i], i].max() * claims[i, 1]),
            coordinate=said[i],
        )
        for i in range(count)
    ]
    return _compared(
        pair_lines(ends, lines),
        pair_lines([replace(e, coordinate=None) for e in ends], {}),
        trip,
        rate,
        honest,
        pings / count,
    )


def _compared(
    found: PairLines,
    by_ends: PairLines,
    trip: NDArray[np.float64],
    rate: NDArray[np.float64],
    honest: NDArray[np.bool_],
    pings: float,
) -> Estimated:
    pairs = ~np.eye(len(trip), dtype=np.bool_) & honest[:, None] & honest[None, :]
    unseen = pairs & ~found.measured & ~found.measured.T
    return Estimated(
        latency=np.abs(2 * found.latency - trip)[unseen] / trip[unseen],
        rate=np.abs(found.rate / np.where(pairs, rate, 1.0) - 1.0)[unseen],
        by_ends=np.abs(by_ends.rate / np.where(pairs, rate, 1.0) - 1.0)[unseen],
        pings=pings,
    )


def _anywhere(random: np.random.Generator) -> Coordinate:
    x, y, z = random.normal(0.0, 0.3, 3)
    return Coordinate((x, y, z), float(abs(random.normal(0.0, 0.1))), 0.0)


def laboratory(name: str, volunteers: int) -> DeviceNetwork:
    """The laboratory's `homes`, `city` or `regions`, bootstrap node included: a line by its slowest part."""
    matrix = Matrix.of(laboratory_network(name, volunteers))
    ends = np.minimum(np.array(matrix.uplink)[:, None], np.array(matrix.downlink)[None, :])
    own = np.array(matrix.rate)
    rate = np.where(own > 0, np.minimum(own, np.where(ends > 0, ends, np.inf)), ends)
    return DeviceNetwork(np.array(matrix.latency_s), rate / BIT_S)


def unseen(kind: str, seed: int) -> DeviceNetwork:
    """One of UNSEEN."""
    return networks.continents(seed) if kind == "continents" else networks.uneven(kind, seed)
