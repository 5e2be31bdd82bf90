"""The ranking by credit that reliable peers serve: the first hundred of it, and where the one who asks stands. Docs: credit.md."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Annotated, Final

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.bootstrap.run.amendment import PeerId
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import unpack

FIRST = 100
MAX_BYTES: Final = 1 << 15

Amount = Annotated[int, Field(ge=0, lt=2**53)]


class RankedPeer(BaseModel):
    """What one peer has, in tokens (or samples) times blocks."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    peer: PeerId
    credit: Amount
    rank: Amount
    """From 1; as many as have the same share one. 0: it has nothing."""


class Ranking(BaseModel):
    """As far as the log is known where it is served."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    total: Amount
    """Of all peers together."""
    contributors: Amount
    """How many have some."""
    first: Annotated[tuple[RankedPeer, ...], Field(max_length=FIRST, strict=False)]
    """Who has most, of all who have some."""
    yours: RankedPeer | None = None
    """Of the peer that was asked for."""


def ranking(credit: Mapping[str, int], peer: str = "") -> Ranking:
    """Who is where by `credit`, and where `peer` is. Raises `ProtocolError` if that is no peer id."""
    most = heapq.nsmallest(FIRST, credit.items(), key=lambda entry: (-entry[1], entry[0]))
    higher = {amount: place for place, (_, amount) in reversed([*enumerate(most)])}
    yours = None
    if peer:
        own = credit.get(peer, 0)
        rank = 1 + sum(amount > own for amount in credit.values()) if own else 0
        try:
            yours = RankedPeer(peer=peer, credit=own, rank=rank)
        except ValidationError as error:
            raise ProtocolError("credit of a peer id that is none") from error
    return Ranking(
        total=sum(credit.values()),
        contributors=len(credit),
        first=tuple(RankedPeer(peer=one, credit=amount, rank=1 + higher[amount]) for one, amount in most),
        yours=yours,
    )


def encode(found: Ranking) -> bytes:
    """As it travels."""
    data: bytes = msgpack.packb(found.model_dump())
    return data


def decode(data: bytes | bytearray, peer: str) -> Ranking:
    """What `peer` has answered. Raises `ProtocolError` for anything that is no ranking."""
    plain = unpack(data, "a ranking by credit", peer)
    try:
        return Ranking.model_validate(plain)
    except ValidationError as error:
        raise ProtocolError("a ranking by credit that is none", peer=peer) from error
