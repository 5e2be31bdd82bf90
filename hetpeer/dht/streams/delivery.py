"""Judging slow peers: what a peer has delivered while one of its frames is incomplete. Pure.

A home connection is slow as a whole: its bytes come over one stream or another, a packet at a time, and now
and then nothing comes for seconds because other streams have their turn. So the peer's traffic in all its
streams must reach a floor. One stream that gets bytes again and again, but hardly any, drips: no network does
that.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from dataclasses import dataclass

FIRST_BYTE_S = 5.0
"""Seconds from the opening of a stream to its first byte."""
WINDOW_S = 8.0
"""Seconds over which a peer's traffic, and a drip, is judged."""
FLOOR = 1000.0
"""Least bytes/s of a peer in all its streams while a frame is due: 1/20 of the slowest useful connection."""
STRANGERS_FLOOR, STRANGERS_WINDOW_S = 16_000.0, 5.0
"""The same for peers that have no part in the step: they have nothing long to say."""
DRIP_BYTES = 1000
"""Fewer bytes than this in a window, spread over at least DRIP_TIMES of its seconds, are a drip."""
DRIP_TIMES = 3
FRAME_S = 60.0
"""Seconds that a whole frame may take, besides its length at the floor."""


class DeliveryState(enum.Enum):
    """Judgement of a stream with an incomplete frame; the values are the reasons in logs."""

    FINE = "fine"
    SLOW = "it delivered too little"
    DRIPS = "it drips"
    LATE = "its frame takes too long"


@dataclass(slots=True, weakref_slot=True)
class PeerTraffic:
    """Bytes that one peer has sent us, in all streams."""

    nbytes: int = 0


@dataclass(slots=True)
class Delivery:
    """Bytes that came on one stream, and the traffic of its peer."""

    peer: PeerTraffic
    nbytes: int = 0

    def came(self, nbytes: int) -> None:
        """Count `nbytes` that arrived."""
        self.nbytes += nbytes
        self.peer.nbytes += nbytes


@dataclass(frozen=True, slots=True)
class DeliveryPace:
    """Required delivery while a frame is incomplete: `floor` bytes/s in all streams of the peer over
    `window_s`.
    """

    floor: float = FLOOR
    window_s: float = WINDOW_S


MEMBER = DeliveryPace()
STRANGER = DeliveryPace(STRANGERS_FLOOR, STRANGERS_WINDOW_S)


class FrameWatch:
    """Watches one incomplete frame of `length` bytes. Call `judge` once a second."""

    def __init__(self, delivery: Delivery, length: int, now: float, pace: DeliveryPace = MEMBER) -> None:
        self._delivery = delivery
        self._pace = pace
        self._deadline = now + FRAME_S + length / pace.floor
        self._seen = deque([(now, delivery.nbytes, delivery.peer.nbytes)])

    def judge(self, now: float) -> DeliveryState:
        """The state at `now`, in seconds of the clock of the constructor's `now`."""
        delivery, seen = self._delivery, self._seen
        seen.append((now, delivery.nbytes, delivery.peer.nbytes))
        while now - seen[1][0] >= WINDOW_S:
            seen.popleft()
        if now > self._deadline:
            return DeliveryState.LATE
        if now - seen[0][0] >= WINDOW_S and self.drips:
            return DeliveryState.DRIPS
        began = next(((at, peer) for at, _, peer in reversed(seen) if now - at >= self._pace.window_s), None)
        if began is not None and delivery.peer.nbytes - began[1] < self._pace.floor * (now - began[0]):
            return DeliveryState.SLOW if not self.drips else DeliveryState.DRIPS
        return DeliveryState.FINE

    @property
    def drips(self) -> bool:
        """Whether the bytes since the window began came in drops."""
        marks = [own for _, own, _ in self._seen]
        times = sum(after > before for before, after in itertools.pairwise(marks))
        return times >= DRIP_TIMES and marks[-1] - marks[0] < DRIP_BYTES
