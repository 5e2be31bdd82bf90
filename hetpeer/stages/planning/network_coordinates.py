"""Network coordinates: a point for each peer, so that the distance of two is the round trip between them.

Vivaldi (Dabek et al., SIGCOMM 2004): three dimensions for the way through the network, and a height for the
line of the peer itself, which every packet passes. Unlike there, round trips are kept, one for each peer
(the least of the last few, after Ledlie et al., NSDI 2007). All of them together move the point, by the mean
of their pulls. A pull is at most half of its round trip, less where we are sure, and a peer weighs no more
than one that is as sure as we are. So one peer in k moves a point by a k-th of what all may, whatever it says
and however late it answers. Pure; times are in seconds.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

DIMENSIONS = 3
UNIT_S = 1e-5
"""Seconds of 1 in an advert."""
FARTHEST_S = 1.0
"""Largest believed number of a coordinate."""
LONGEST_S = 10.0
"""Longest believed round trip."""
LEAST_S = 1e-4
"""Round trips below are as good as this one: they are those of the machine's scheduler."""
MOST_PEERS = 32
"""Peers whose round trips are kept."""
RECENT = 4
"""Last round trips of a peer, of which the least counts."""
PULL, DOUBT = 0.5, 3.0
"""Most of a pull, as a share of its round trip, and as a multiple of our own error."""
STEP = 0.6
"""Share of the mean pull by which a point is moved in a round."""
ROUNDS = 24
"""Moves each time."""
SURE, UNSURE = 0.02, 1.0
"""Bounds of an error."""
RESTORED = 0.5
"""Least error of a coordinate that was kept: the others may all have moved since."""
BEGUN = 0.99
"""Error of one that has its height, half of its shortest round trip, and whom nobody has moved yet."""
NEAR = 0.5
"""Radius within which points begin, as a share of the shortest round trip."""

Point = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Point and height of a peer in seconds of round trip, and its error as a share of a round trip.

    tokyo.trip_s(london)  # 0.21
    Coordinate.of(tokyo.numbers()) == tokyo  # to UNIT_S, and a hundredth of error
    """

    at: Point
    height: float
    error: float = UNSURE

    def trip_s(self, other: Coordinate) -> float:
        """Estimated round trip between the two peers."""
        return math.dist(self.at, other.at) + self.height + other.height

    def numbers(self) -> tuple[int, ...]:
        """Point and height in UNIT_S, and error in hundredths: what an advert says."""
        times = (round(_within(x) / UNIT_S) for x in (*self.at, self.height))
        return *times, round(100 * self.error)

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Coordinate | None:
        """The coordinate in a peer's `numbers`; None if they are none, or beyond FARTHEST_S."""
        if len(numbers) != DIMENSIONS + 2 or any(type(number) is not int for number in numbers):
            return None
        *times, error = numbers
        most = round(FARTHEST_S / UNIT_S)
        if any(abs(number) > most for number in times) or times[-1] < 0:
            return None
        x, y, z, height = (number * UNIT_S for number in times)
        return cls((x, y, z), height, min(max(error / 100, SURE), UNSURE))


@dataclass(slots=True)
class _Met:
    """A peer with a round trip."""

    trips: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    in_traffic: bool = False
    """Whether the round trip is one of traffic; pings do not change it then."""
    coordinate: Coordinate | None = None

    @property
    def trip_s(self) -> float:
        return max(min(self.trips), LEAST_S)


class OwnCoordinate:
    """The coordinate of this peer, from round trips to others.

    own = OwnCoordinate(node.peer_id)
    own.pinged("QmPeer", 0.043, Coordinate.of(answer))
    own.move()
    own.coordinate.numbers()
    """

    def __init__(self, peer: str, kept: Coordinate | None = None) -> None:
        """`peer`: our id, which says where near the middle we begin. `kept`: where we were last."""
        digest = hashlib.sha256(peer.encode()).digest()
        x, y, z = ((byte - 127.5) / 127.5 for byte in digest[:DIMENSIONS])
        self.coordinate = Coordinate((x, y, z), 0.0)
        if kept is not None:
            self.coordinate = replace(kept, error=max(kept.error, RESTORED))
        self._begun = kept is not None
        self._met: dict[str, _Met] = {}
        """Peer → its round trips; the one that was met last stands last."""

    @property
    def is_known(self) -> bool:
        """Whether the coordinate says anything."""
        return self._begun

    @property
    def known(self) -> Coordinate | None:
        """The coordinate; None as long as it says nothing."""
        return self.coordinate if self._begun else None

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of an advert; none as long as they say nothing."""
        return self.coordinate.numbers() if self._begun else ()

    @property
    def met(self) -> Collection[str]:
        """Peers with a round trip."""
        return self._met.keys()

    def pinged(self, peer: str, trip_s: float, coordinate: Coordinate | None = None) -> None:
        """Note a round trip of a ping, and the coordinate that `peer` answered with."""
        if (met := self._meet(peer, trip_s)) is not None:
            if not met.in_traffic:
                met.trips.append(trip_s)
            met.coordinate = coordinate or met.coordinate

    def carried(self, peer: str, trip_s: float) -> None:
        """Note the best round trip of a link in use; from then on it counts, and pings of `peer` do not."""
        if (met := self._meet(peer, trip_s)) is not None:
            met.in_traffic = True
            met.trips.clear()
            met.trips.append(trip_s)

    def heard(self, coordinates: Mapping[str, Coordinate]) -> None:
        """Take up what peers say of themselves in their adverts."""
        for peer, coordinate in coordinates.items():
            if (met := self._met.get(peer)) is not None:
                met.coordinate = coordinate

    def keep_only(self, peers: Collection[str]) -> None:
        """Forget peers that are gone."""
        self._met = {peer: met for peer, met in self._met.items() if peer in peers}

    def move(self) -> None:
        """Move the coordinate ROUNDS times towards where all round trips would be right."""
        if self._met and not self._begun:
            shortest_s = min(met.trip_s for met in self._met.values())
            x, y, z = (NEAR * shortest_s * part for part in self.coordinate.at)
            self.coordinate = Coordinate((x, y, z), shortest_s / 2, BEGUN)
            self._begun = True
        met = [
            (one.trip_s, one.coordinate)
            for one in self._met.values()
            if one.coordinate is not None and one.coordinate.error < UNSURE
        ]
        if not met:
            return
        own = self.coordinate
        at, height = own.at, own.height
        # A peer that claims to be surer than we are weighs no more than one that is as sure.
        weights = [1.0 / (1.0 + max(other.error / own.error, 1.0)) / trip_s for trip_s, other in met]
        total = sum(weights)
        most = min(PULL, DOUBT * own.error)
        for _ in range(ROUNDS):
            moved, risen = [0.0] * DIMENSIONS, 0.0
            for weight, (trip_s, other) in zip(weights, met, strict=True):
                apart = math.dist(at, other.at)
                off_s = trip_s - (apart + height + other.height)
                pull = STEP * weight / total * min(max(off_s, -most * trip_s), most * trip_s)
                risen += pull
                if apart > 0.0:
                    for axis in range(DIMENSIONS):
                        moved[axis] += pull * (at[axis] - other.at[axis]) / apart
            x, y, z = (_within(now + by) for now, by in zip(at, moved, strict=True))
            at, height = (x, y, z), min(max(height + risen, 0.0), FARTHEST_S)
        # Others move by the same round trips at the same time: half of the way is ours.
        x, y, z = ((now + then) / 2 for now, then in zip(at, own.at, strict=True))
        found = Coordinate((x, y, z), (height + own.height) / 2)
        off = median(min(abs(trip_s - found.trip_s(other)) / trip_s, UNSURE) for trip_s, other in met)
        error = max((own.error + off) / 2, 1.0 / len(met), SURE)  # few round trips fit nearly any point
        self.coordinate = replace(found, error=min(error, BEGUN))

    def _meet(self, peer: str, trip_s: float) -> _Met | None:
        """The place for a round trip of `peer`; None if it is none that can be believed."""
        if not 0.0 < trip_s < LONGEST_S:  # refuses NaN as well
            return None
        met = self._met[peer] = self._met.pop(peer, _Met())
        while len(self._met) > MOST_PEERS:
            del self._met[next(iter(self._met))]
        return met


def _within(x: float) -> float:
    """`x` as a number that a coordinate may have."""
    return min(max(x, -FARTHEST_S), FARTHEST_S)
