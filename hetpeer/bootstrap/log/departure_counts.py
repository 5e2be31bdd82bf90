"""How often each peer has left a run or was lost, and how often it is expected to, served by reliable peers.

Pure. All of it follows from the log: its `gone` records, and the seconds of its commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Final

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.run.owner_signature import PeerId
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import Count, unpack

MOST: Final = 512
"""Peers that are named: those that left most often."""
MAX_BYTES: Final = 1 << 16
HOUR_S: Final = 3600.0
LEAST_S: Final = HOUR_S
"""Seconds of training before which nothing is expected."""

Hourly = Annotated[float, Field(ge=0.0, le=HOUR_S)]


class DepartureCounts(BaseModel):
    """Departures by the log as far as the serving peer knows it."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    peers: Annotated[dict[PeerId, Count], Field(max_length=MOST)]
    complete: bool
    """Whether all peers that ever left are named."""
    hourly: Annotated[dict[PeerId, Hourly], Field(max_length=MOST)] = {}
    """Expected departures an hour of peers that have worked; empty: not known, or an older version."""

    def of(self, peer: str) -> int | None:
        """Departures of `peer`; None: not known, since too many others have left more often."""
        return self.peers.get(peer, 0 if self.complete else None)


def hourly(history: History) -> dict[str, float]:
    """Expected departures of each peer in an hour of training, by what it has done so far.

    A peer with d departures in h hours is expected to leave (d + 1) / (h + 1 / m) times, where m is the mean
    of all peers: as if each had left once at the mean rate before. Empty before LEAST_S, or if nobody left.
    """
    there_h = {peer: (history.trained_s - at) / HOUR_S for peer, at in history.named_at.items()}
    together_h, left = sum(there_h.values()), history.departures.total()
    if history.trained_s < LEAST_S or not left or together_h <= 0.0:
        return {}
    usual_h = together_h / left
    return {
        peer: min((history.departures[peer] + 1) / (hours + usual_h), HOUR_S)
        for peer, hours in there_h.items()
    }


def encode(history: History) -> bytes:
    """The counts as msgpack, with the rates of the peers that were named last."""
    departures, rates = history.departures, hourly(history)
    newest: Mapping[str, float] = dict(islice(reversed(rates.items()), MOST))
    told = {
        "peers": dict(departures.most_common(MOST)),
        "complete": len(departures) <= MOST,
        "hourly": newest,
    }
    data: bytes = msgpack.packb(told, use_single_float=True)
    return data


def decode(data: bytes | bytearray, peer: str) -> DepartureCounts:
    """The counts in an answer of `peer`. Raises `ProtocolError` if there are none."""
    plain = unpack(data, "counts of departures", peer)
    try:
        return DepartureCounts.model_validate(plain)
    except ValidationError as error:
        raise ProtocolError("counts of departures that are none", peer=peer) from error
