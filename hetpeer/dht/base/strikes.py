"""The ledger of offences: what each peer did wrong, and who is refused for a while. Pure.

A strike is for what no honest peer does, however slow its connection: broken streams, slow links and vanished
peers are no strikes. Strikes fade. A peer with too many is refused for a while, and longer each time.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetpeer.dht.base.errors import ProtocolError

LIMIT = 4.5
"""Faded strikes at which a peer is refused: five within a minute."""
FADE_S = 600.0
"""Half-life of a strike in seconds."""
FIRST_REFUSAL_S = 60.0
LONGEST_REFUSAL_S = 3600.0
FORGIVEN_S = 6 * 3600.0
"""After so many seconds without a refusal the next one is short again."""
MAX_PEERS = 1024
"""Peers that are remembered: those with the most strikes."""


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

    def __init__(self, kind: Offence, what: str, *, peer: str = "", why: str = "") -> None:
        super().__init__(what, peer=peer, why=why)
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
        """Count one offence. Returns the seconds for which the peer is refused from now on because of it; 0:
        not refused.
        """
        record = self._peers.setdefault(peer, _PeerStrikes(at=now))
        record.counts[kind] += 1
        record.score, record.at = record.faded(now) + 1.0, now
        self._forget(peer, now)
        if record.score < LIMIT or now < record.until:
            return 0.0
        if now - record.until > FORGIVEN_S:
            record.refusals = 0
        seconds = min(FIRST_REFUSAL_S * 2.0**record.refusals, LONGEST_REFUSAL_S)
        record.refusals += 1
        record.until = now + seconds
        record.score = LIMIT / 2  # afterwards it takes fewer strikes
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
