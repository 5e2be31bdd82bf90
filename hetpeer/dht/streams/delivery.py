"""Who is slow, and who only pretends to be: what a peer has delivered while a frame of it was waited for. Pure.

A home line is slow as a whole: its bytes come over one stream or another, in pieces of a packet and more, and now and then
nothing comes for seconds because other streams have their turn. So it is the peer's traffic in all its streams that has to
reach a floor; and one stream that gets bytes again and again, but hardly any, drips: no network does that.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from dataclasses import dataclass

FIRST_BYTE_S = 5.0
"""What a stream has time for, from its opening to its first byte."""
WINDOW_S = 8.0
"""Over so long a peer's traffic is judged, and a drip."""
FLOOR = 1000.0
"""Bytes/s of a peer in all its streams, while a frame is waited for: a twentieth of the slowest line that is of any use."""
STRANGERS_FLOOR, STRANGERS_WINDOW_S = 16_000.0, 5.0
"""Of peers that have no part in the step: they have nothing to say that takes long."""
DRIP_BYTES = 1000
"""Fewer bytes in a window that came in at least DRIP_TIMES of its seconds are a drip."""
DRIP_TIMES = 3
FRAME_S = 60.0
"""What a whole frame may take, besides its length at the floor."""


class DeliveryState(enum.Enum):
    """What is thought of a stream that owes us the rest of a frame."""

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
    """Bytes that came on one stream."""

    peer: PeerTraffic
    nbytes: int = 0

    def came(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peer.nbytes += nbytes


@dataclass(frozen=True, slots=True)
class DeliveryPace:
    """What is asked of a peer while it owes us the rest of a frame: `floor` bytes/s in all its streams over `window_s`."""

    floor: float = FLOOR
    window_s: float = WINDOW_S


MEMBER = DeliveryPace()
STRANGER = DeliveryPace(STRANGERS_FLOOR, STRANGERS_WINDOW_S)


class FrameWatch:
    """Over one frame that has begun, of `length` bytes in all; to be asked once a second."""

    def __init__(self, delivery: Delivery, length: int, now: float, pace: DeliveryPace = MEMBER) -> None:
        self._delivery = delivery
        self._pace = pace
        self._deadline = now + FRAME_S + length / pace.floor
        self._seen = deque([(now, delivery.nbytes, delivery.peer.nbytes)])

    def judge(self, now: float) -> DeliveryState:
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
        """Whether what came since the window began came in drops."""
        marks = [own for _, own, _ in self._seen]
        times = sum(after > before for before, after in itertools.pairwise(marks))
        return times >= DRIP_TIMES and marks[-1] - marks[0] < DRIP_BYTES
