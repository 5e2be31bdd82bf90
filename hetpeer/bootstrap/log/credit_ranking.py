"""Ranking by credit, served by reliable peers: the first hundred peers, and the peer that asks.

Docs: credit.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Annotated, Final

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.bootstrap.run.owner_signature import PeerId
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import unpack

FIRST = 100
MAX_BYTES: Final = 1 << 15

Amount = Annotated[int, Field(ge=0, lt=2**53)]


class RankedPeer(BaseModel):
    """Credit and rank of one peer, in tokens (or samples) times blocks."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    peer: PeerId
    credit: Amount
    rank: Amount
    """Rank from 1; peers with equal credit share a rank. 0: no credit."""


class Ranking(BaseModel):
    """The ranking by the log as far as the serving peer knows it."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    total: Amount
    """Credit of all peers together."""
    contributors: Amount
    """Number of peers with credit."""
    first: Annotated[tuple[RankedPeer, ...], Field(max_length=FIRST, strict=False)]
    """The peers with the most credit."""
    yours: RankedPeer | None = None
    """The peer that the request names."""


def ranking(credit: Mapping[str, int], peer: str = "") -> Ranking:
    """Ranking by `credit`, with the rank of `peer`. Raises `ProtocolError` if `peer` is no peer id."""
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
    """The ranking as msgpack."""
    data: bytes = msgpack.packb(found.model_dump())
    return data


def decode(data: bytes | bytearray, peer: str) -> Ranking:
    """The ranking in an answer of `peer`. Raises `ProtocolError` if there is none."""
    plain = unpack(data, "a ranking by credit", peer)
    try:
        return Ranking.model_validate(plain)
    except ValidationError as error:
        raise ProtocolError("a ranking by credit that is none", peer=peer) from error
