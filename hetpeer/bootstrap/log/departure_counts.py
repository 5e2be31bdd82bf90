"""How often each peer has left a run or was lost, served by reliable peers. Pure.

All of it follows from the `gone` records of the log.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Final

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.bootstrap.run.owner_signature import PeerId
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import Count, unpack

MOST: Final = 512
"""Peers that are named: those that left most often."""
MAX_BYTES: Final = 1 << 16


class DepartureCounts(BaseModel):
    """Departures by the log as far as the serving peer knows it."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    peers: Annotated[dict[PeerId, Count], Field(max_length=MOST)]
    complete: bool
    """Whether all peers that ever left are named."""

    def of(self, peer: str) -> int | None:
        """Departures of `peer`; None: not known, since too many others have left more often."""
        return self.peers.get(peer, 0 if self.complete else None)


def encode(departures: Counter[str]) -> bytes:
    """The counts as msgpack."""
    told = {"peers": dict(departures.most_common(MOST)), "complete": len(departures) <= MOST}
    data: bytes = msgpack.packb(told)
    return data


def decode(data: bytes | bytearray, peer: str) -> DepartureCounts:
    """The counts in an answer of `peer`. Raises `ProtocolError` if there are none."""
    plain = unpack(data, "counts of departures", peer)
    try:
        return DepartureCounts.model_validate(plain)
    except ValidationError as error:
        raise ProtocolError("counts of departures that are none", peer=peer) from error
