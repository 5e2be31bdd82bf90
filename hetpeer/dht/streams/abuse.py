"""Limits on what peers may do to us: slow delivery, offences, streams, dials. Pure: times are given.

Delivery. A home connection is slow as a whole: its bytes come over one stream or another, a packet at a time,
and now and then nothing comes for seconds because other streams have their turn. So the peer's traffic in all
its streams must reach a floor while a frame is incomplete. A stream drips if bytes keep coming on it, but
hardly any: no network does that.

Offences. A peer gets a strike for what no honest peer does, even on a slow connection: broken streams, slow
links and vanished peers are no strikes. Strikes fade. A peer with too many is refused, longer each time.

Strangers. One network of the internet gets at most a quarter of the streams for strangers, so that the first
to come cannot keep out everybody else. When all are taken, the stream that has been of no use for longest
gives way (links.md). A peer that asks us to dial it may do so a few times a minute (nat.md).
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hetpeer.dht.base.errors import ProtocolError

if TYPE_CHECKING:
    from hetpeer.dht.streams.stream import Stream

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
REFUSAL_STRIKES = 4.5
"""Faded strikes at which a peer is refused: five within a minute."""
FADE_S = 600.0
"""Half-life of a strike in seconds."""
FIRST_REFUSAL_S = 60.0
LONGEST_REFUSAL_S = 3600.0
FORGIVEN_S = 6 * 3600.0
"""Seconds without a refusal after which the next refusal is short again."""
MAX_PEERS = 1024
"""Peers that are remembered: those with the most strikes."""
NETWORK_SHARE = 4
"""One network may take 1/NETWORK_SHARE of the streams for strangers."""
SEAT_IDLE_S = 30.0
"""Seconds since a payload began or ended after which a stream is idle; beats do not count."""
SEAT_LONG_S = 120.0
"""Seconds in one transfer after which a stream gives way if none is idle; the transfer is repeated."""
DIAL_WINDOW_S = 60.0
DIALS_PER_PEER = 4
DIALS_PER_IP = 64
DIALS_AT_ONCE = 16
"""Dials in DIAL_WINDOW_S: of one peer, of one IP address (a school, a carrier's NAT); dials at a time."""


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
    drips: bool = False
    """Whether the last bytes came in drops."""

    def came(self, nbytes: int) -> None:
        """Count `nbytes` that arrived."""
        self.nbytes += nbytes
        self.peer.nbytes += nbytes


@dataclass(frozen=True, slots=True)
class DeliveryPace:
    """Required delivery during an incomplete frame: `floor` bytes/s in a peer's streams over `window_s`."""

    floor: float = FLOOR
    window_s: float = WINDOW_S


MEMBER = DeliveryPace()
STRANGER = DeliveryPace(STRANGERS_FLOOR, STRANGERS_WINDOW_S)


class FrameWatch:
    """Watches one incomplete frame of `length` bytes. Call `judge` once a second.

    `began`: time in seconds, and the bytes of the stream and of its peer, when the frame began.
    """

    def __init__(
        self, delivery: Delivery, length: int, began: tuple[float, int, int], pace: DeliveryPace = MEMBER
    ) -> None:
        self._delivery = delivery
        self._pace = pace
        self._deadline = began[0] + FRAME_S + length / pace.floor
        self._seen = deque([began])

    def judge(self, now: float) -> DeliveryState:
        """The state at `now`, in seconds of the clock of `began`."""
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


class Offence(enum.StrEnum):
    """Kinds of offences. The values are shown in logs and metrics."""

    MALFORMED = "malformed"
    LENGTH = "length"
    CODEC = "codec"
    NOT_FINITE = "not finite"
    UNREADABLE = "unreadable"
    DRIP = "drip"
    FLOOD = "flood"
    WRONG_SIDE = "wrong side"


class OffenceError(ProtocolError):
    """A `ProtocolError` with an offence other than MALFORMED."""

    def __init__(self, kind: Offence, what: str, *, peer: str = "") -> None:
        super().__init__(what, peer=peer)
        self.kind = kind


def kind_of(error: ProtocolError) -> Offence:
    """The offence of an error; MALFORMED for a plain `ProtocolError`."""
    return error.kind if isinstance(error, OffenceError) else Offence.MALFORMED


@dataclass(slots=True)
class _PeerStrikes:
    counts: Counter[Offence] = field(default_factory=Counter)
    score: float = 0.0
    at: float = 0.0
    refusals: int = 0
    until: float = float("-inf")

    def faded(self, now: float) -> float:
        return self.score * math.exp2(-max(now - self.at, 0.0) / FADE_S)


class Strikes:
    """The ledger of one process. Times are seconds of a clock that only rises.

    strikes = Strikes()
    seconds = strikes.strike(peer_id, Offence.FLOOD, now)  # > 0: refused for so long
    strikes.refuses(peer_id, now)
    """

    def __init__(self) -> None:
        self._peers: dict[str, _PeerStrikes] = {}

    def strike(self, peer: str, kind: Offence, now: float) -> float:
        """Count an offence; return the seconds for which it makes us refuse the peer; 0: not refused."""
        record = self._peers.setdefault(peer, _PeerStrikes(at=now))
        record.counts[kind] += 1
        record.score, record.at = record.faded(now) + 1.0, now
        self._forget(peer, now)
        if record.score < REFUSAL_STRIKES or now < record.until:
            return 0.0
        if now - record.until > FORGIVEN_S:
            record.refusals = 0
        seconds = min(FIRST_REFUSAL_S * 2.0**record.refusals, LONGEST_REFUSAL_S)
        record.refusals += 1
        record.until = now + seconds
        record.score = REFUSAL_STRIKES / 2  # afterwards it takes fewer strikes
        return seconds

    def refuses(self, peer: str, now: float) -> bool:
        """Whether the peer is refused at `now`."""
        record = self._peers.get(peer)
        return record is not None and now < record.until

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Peer → offence → how often, since the process began."""
        return {
            peer: {str(kind): n for kind, n in record.counts.items()} for peer, record in self._peers.items()
        }

    def _forget(self, newest: str, now: float) -> None:
        if len(self._peers) > MAX_PEERS:
            mildest = min(
                (peer for peer in self._peers if peer != newest),
                key=lambda peer: (self._peers[peer].until > now, self._peers[peer].faded(now)),
            )
            del self._peers[mildest]


class DialBudget:
    """Limits on the dials that others may cause."""

    def __init__(self) -> None:
        self._dialling = 0
        self._recent: dict[str, deque[float]] = defaultdict(deque)

    def admit(self, now: float, peer_id: str, ip: str) -> bool:
        """Whether to dial for this peer at this address now; if so it is counted."""
        for key in [key for key, times in self._recent.items() if times[-1] <= now - DIAL_WINDOW_S]:
            del self._recent[key]
        for key, limit in ((peer_id, DIALS_PER_PEER), (ip, DIALS_PER_IP)):
            times = self._recent.get(key, ())
            if sum(time > now - DIAL_WINDOW_S for time in times) >= limit:
                return False
        if self._dialling >= DIALS_AT_ONCE:
            return False
        for key in (peer_id, ip):
            self._recent[key].append(now)
        return True

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count one dial during the block."""
        self._dialling += 1
        try:
            yield
        finally:
            self._dialling -= 1


def has_share(network: str, taken: Collection[Stream], most: int) -> bool:
    """Whether `network` may have one more of `most` streams."""
    return not network or sum(seat.network == network for seat in taken) < max(1, most // NETWORK_SHARE)


def gives_way(taken: Collection[Stream], now: float) -> Stream | None:
    """The stream that gives way to a new one; None if all are in use."""

    def idle_s(seat: Stream) -> float:
        return now - seat.used_at - (SEAT_LONG_S if seat.busy else SEAT_IDLE_S)

    longest = max(taken, key=idle_s, default=None)
    return longest if longest is not None and idle_s(longest) > 0 else None
