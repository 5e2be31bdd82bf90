"""Address records: where a peer listens, signed by its key and numbered. Pure.

A record speaks of its signer alone, so nobody can have another peer looked for at a third one's address. Of
two records the one with the higher number counts. `AddressBook` keeps the newest record of each peer that its
node looks for, and no other, so its size is bounded; docs/protocol.md ("Where a peer is") has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, Any

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.dht.base.errors import LocalError, ProtocolError
from hetpeer.dht.base.untrusted import Count, first_wrong
from hetpeer.dht.identity.addresses import Address, far_first, parse_address
from hetpeer.dht.identity.peer_identity import MAX_PUBLIC_BYTES, Identity, peer_id_of, verify

MAX_PLACES = 4
"""Addresses in one record."""
MAX_ASKED = 8
"""Peers that one question names, and records in one answer."""
_MAX_TEXT = 256
_DOMAIN = b"hetpeer address record 1\0"


class _Fields(BaseModel):
    """A record as it travels."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    key: Annotated[bytes, Field(max_length=MAX_PUBLIC_BYTES)]
    number: Count
    addresses: Annotated[list[Annotated[str, Field(max_length=_MAX_TEXT)]], Field(max_length=MAX_PLACES)]
    signature: Annotated[bytes, Field(max_length=MAX_PUBLIC_BYTES)]


@dataclass(frozen=True, slots=True)
class AddressRecord:
    """`peer_id` listens at `addresses`; `fields` is the record as it travels."""

    peer_id: str
    number: int
    addresses: tuple[Address, ...]
    fields: Mapping[str, Any]


def sign_record(identity: Identity, number: int, addresses: Iterable[Address]) -> AddressRecord:
    """The record of `identity` with those of its `addresses` that others can dial."""
    places = tuple(_worth_telling(addresses))
    texts = [place.text for place in places]
    fields = {
        "key": identity.public_bytes,
        "number": number,
        "addresses": texts,
        "signature": identity.sign(_signed_bytes(number, texts)),
    }
    return AddressRecord(identity.peer_id, number, places, fields)


def read_record(value: object) -> AddressRecord:
    """The record in a peer's message. Raises `ProtocolError` unless its signer says this of itself."""
    try:
        fields = _Fields.model_validate(value)
    except ValidationError as error:
        field, why = first_wrong(error)
        raise ProtocolError(f"an address record whose {field} is wrong", why=why) from error
    if not verify(fields.key, _signed_bytes(fields.number, fields.addresses), fields.signature):
        raise ProtocolError("an address record that its peer has not signed")
    peer_id = peer_id_of(fields.key)
    try:
        places = tuple(parse_address(text) for text in fields.addresses)
    except LocalError as error:
        raise ProtocolError("an address record with an address that is none", why=error.why) from error
    if any(place.peer_id != peer_id or place.relay or place.socket is None for place in places):
        raise ProtocolError("an address record with an address that is not its peer's own")
    return AddressRecord(peer_id, fields.number, places, fields.model_dump())


class AddressBook:
    """The newest records of the peers that are `sought`, and our own."""

    def __init__(self, identity: Identity, sought: Callable[[], Collection[str]]) -> None:
        self._identity = identity
        self._sought = sought
        self._records: dict[str, AddressRecord] = {}
        self._above = 0
        """The highest number that others have seen of ours, perhaps from a life with another clock."""

    def own(self, addresses: Iterable[Address], wall_s: float) -> AddressRecord:
        """Our record with `addresses`: the last one if they are the same, otherwise one that replaces it."""
        before = self._records.get(self._identity.peer_id)
        places = tuple(_worth_telling(addresses))
        if before is None or before.addresses != places or before.number <= self._above:
            number = max(int(wall_s * 1000), self._above + 1, before.number + 1 if before else 0)
            before = sign_record(self._identity, number, places)
            self._records[before.peer_id] = before
        return before

    def learn(self, record: AddressRecord) -> bool:
        """Keep `record` if its peer is sought and it is newer; whether it was kept."""
        if record.peer_id == self._identity.peer_id:
            self._above = max(self._above, record.number)
            return False
        sought = self._sought()
        before = self._records.get(record.peer_id)
        if record.peer_id not in sought or (before is not None and before.number >= record.number):
            return False
        self._records[record.peer_id] = record
        for peer in self._records.keys() - {self._identity.peer_id, *sought}:
            del self._records[peer]
        return True

    def of(self, peer_id: str) -> AddressRecord | None:
        """The newest record of `peer_id` known here."""
        return self._records.get(peer_id)


def _worth_telling(addresses: Iterable[Address]) -> list[Address]:
    """Direct addresses, those on the internet first; of this machine alone only if there are no others."""
    places = far_first(addresses)
    beyond = [place for place in places if place.socket and not ip_address(place.socket[0]).is_loopback]
    return (beyond or places)[:MAX_PLACES]


def _signed_bytes(number: int, addresses: Iterable[str]) -> bytes:
    packed: bytes = msgpack.packb([number, list(addresses)])
    return _DOMAIN + packed
