"""Decoders of dht/: frames and what stands in their headers, records of the DHT, addresses, and what
libp2p's peers say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgpack
from hivemind.dht.validation import DHTRecord

from hetpeer.dht.base import untrusted
from hetpeer.dht.base.errors import LocalError, ProtocolError, RemoteError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.base.untrusted import read_fields, varint
from hetpeer.dht.direct.tls_listener import TICKET_BYTES, invitation
from hetpeer.dht.discovery import Advert, LeftoverIds, LinkNote, TaskNote
from hetpeer.dht.identity.addresses import (
    Address,
    address_from_bytes,
    at_socket,
    far_first,
    network_in,
    parse_address,
    text_of,
    through,
)
from hetpeer.dht.kademlia.first_contact import check_clock, read_hello
from hetpeer.dht.kademlia.records import OwnerValidator, _signed_bytes
from hetpeer.dht.kademlia.table import MAX_PAYLOAD, KnownKeys
from hetpeer.dht.p2pd.tcp_probe import owner_of
from hetpeer.dht.reach.dialback import read_hint, read_port, read_ports
from hetpeer.dht.reach.relay_slots import reservation_in
from hetpeer.dht.streams import flow_control, stream
from tests.dht.certificates import certificate
from tests.fuzz.target import PLACES, A, B, Target, known, same


def header(data: bytes) -> dict[str, Any]:
    return stream.decode_header(data)


def packed(*values: Any) -> list[bytes]:
    return [msgpack.packb(value) for value in values]


# ── frames ──────────────────────────────────────────────────────────────────────────────────────────────────

HEADERS = [
    {"n": 7, "a": 6, "t": 12.5, "r": 1e6, "b": [4096, 65536, 4096], "g": [[2, 70000]], "m": {"kind": "x"}},
    {"key": "ab", "lane": 1, "has": 0, "begun": False, "x": [None, True, b"\0", {"y": [1.5, -1, 2**64 - 1]}]},
]


def prefix(data: bytes) -> tuple[int, int]:
    length, payload = stream.decode_prefix(data)
    assert 0 < length <= stream.MAX_HEADER
    assert payload <= stream.DEFAULT_PAYLOAD_LIMIT
    return length, payload


def head_of(found: Any) -> bytes:
    return stream.encode_head(found, 0)


def credit_in(data: bytes) -> tuple[tuple[int, ...], dict[int, int]]:
    fields = header(data)
    return flow_control.unpack_base(fields.get("b")), flow_control.unpack(fields.get("g"))


def grants(found: tuple[tuple[int, ...], dict[int, int]]) -> None:
    """A queue can go by them."""
    base, pools = found
    queue: flow_control.GrantQueue[Any] = flow_control.GrantQueue()
    queue.granted(base, pools)
    assert flow_control.unpack([*map(list, pools.items())]) == pools
    for pool in (0, 1, 5, flow_control.MAX_POOL):
        queue.is_short(pool, 1)


# ── records ─────────────────────────────────────────────────────────────────────────────────────────────────

ADVERTS = [
    Advert(),
    Advert(
        name="ada",
        addresses=tuple(PLACES[:3]),
        role="volunteer",
        state="working",
        block_begin=1,
        block_end=4,
        step=17,
        loss=2.5,
        tokens_per_second=1200.0,
        computes=0.5,
        uplink=1e6,
        memory_bytes=1 << 33,
        relays=("CtioEB",),
        links=(LinkNote(to="SupNKC", rate=1e6, ratio=4.0, path="direct"),),
    ),
]


def advert(data: bytes) -> Advert:
    return Advert.from_map(header(data), peer=A)


def is_advert(found: Advert) -> None:
    assert Advert.from_map(found.to_map(), peer=A) == found
    labels = [found.name, found.role, found.state, *found.relays, *(link.to for link in found.links)]
    assert all(label.isascii() and label.isprintable() and len(label) <= 32 for label in labels)


def note(data: bytes) -> TaskNote:
    return TaskNote.from_map(header(data), peer=A)


def note_of(found: TaskNote) -> bytes:
    data: bytes = msgpack.packb(found.model_dump(mode="json"))
    return data


NOTES = [
    TaskNote(term=1, view=2, step=3),
    TaskNote(term=1, view=0, step=9, leftovers=(LeftoverIds(border=2, ids=(4, 5)),)),
]

RECORD_KEY = b"\x17" * 20
SUBKEY = msgpack.packb(known().peer_id)
JUDGE = OwnerValidator(known(), SystemClock(), KnownKeys())


def record(data: bytes) -> DHTRecord:
    """All that whoever stores a record says, or the value alone; one that must not be is refused by an
    error of ours.
    """
    try:
        fields = msgpack.unpackb(data)
        said = DHTRecord(fields["key"], fields["subkey"], fields["value"], float(fields["expires"]))
        whole = all(isinstance(part, bytes) for part in (said.key, said.subkey, said.value))
    except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException):
        whole = False
    if not whole:  # protobuf lets nothing else through
        said = DHTRecord(RECORD_KEY, SUBKEY, data, 10.0)
    if not JUDGE.validate(said):
        raise ProtocolError("a record that is not stored")
    return said


def is_record(found: DHTRecord) -> None:
    payload = JUDGE.strip_value(found)
    assert len(payload) <= MAX_PAYLOAD
    untrusted.decode_map(payload, limit=MAX_PAYLOAD)


def records() -> Iterable[bytes]:
    for one in ADVERTS:
        plain = DHTRecord(RECORD_KEY, SUBKEY, msgpack.packb(one.to_map()), 10.0)
        value = JUDGE.sign_value(plain)
        yield value
        yield msgpack.packb({"key": RECORD_KEY, "subkey": SUBKEY, "value": value, "expires": 10.0})
        assert _signed_bytes(plain, plain.value)


# ── what peers answer ───────────────────────────────────────────────────────────────────────────────────────


def hello(data: bytes) -> Any:
    return read_hello(header(data), A, 1.7e9)


def compares(found: Any) -> None:
    try:
        check_clock([found])
    except LocalError as error:
        assert len(error.line()) < 1000


def dialback(data: bytes) -> Any:
    """The three things that are said, each of which may be there."""
    fields = header(data)
    if "ports" in fields:
        return read_ports(fields, A)
    if "port" in fields:
        return read_port(fields, A, [31330])
    return read_hint(fields, A)


def can_be_told(found: Any) -> None:
    if isinstance(found, tuple):
        ip, hint = found
        at_socket(ip, 31330, A)
        assert all(address.socket and not address.relay for address in (*hint.relays, *hint.others))


DIALBACKS = [
    {"ports": [31330, 4001]},
    {"port": 31330},
    {"ip": "203.0.113.7", "relays": [PLACES[0]], "others": PLACES},
    {"ip": "2a01:4f8::1", "relays": [], "others": []},
]


def door(data: bytes) -> tuple[int, bytes, bytes]:
    return invitation(header(data), A)


def can_be_opened(found: tuple[int, bytes, bytes]) -> None:
    port, certificate, ticket = found
    assert at_socket("203.0.113.7", port, A).socket == ("203.0.113.7", port)
    assert (len(certificate), len(ticket)) == (32, TICKET_BYTES)


def slot(data: bytes) -> Any:
    return reservation_in(data, A)


def slots() -> Iterable[bytes]:
    """In protobuf: status 100, the slot until 1.8e9, limits of a day and of 2**40 bytes."""

    def field(number: int, value: int | bytes) -> bytes:
        if isinstance(value, int):
            return varint(number << 3) + varint(value)
        return varint(number << 3 | 2) + varint(len(value)) + value

    granted = field(1, 1) + field(3, field(1, 1_800_000_000) + field(2, b"\x04\x01")) + field(5, 100)
    yield granted
    yield granted + field(4, field(1, 86400) + field(2, 1 << 40))


def proves(data: bytes) -> str:
    owner = owner_of(data)
    if not owner:
        raise ProtocolError("it proves nothing")
    return owner


def is_known(owner: str) -> None:
    assert owner == known().peer_id


# ── addresses ───────────────────────────────────────────────────────────────────────────────────────────────


def address(data: bytes) -> Address:
    return parse_address(data.decode("utf-8", "replace"))


def can_be_dialled(found: Address) -> None:
    assert parse_address(found.text) == found
    assert address_from_bytes(found.transport_bytes(), found.peer_id) == found
    assert through(parse_address(PLACES[0]), found.peer_id).relay == B
    far_first([found])
    network_in(found.text)


def reported(data: bytes) -> Address:
    """In libp2p's binary form: of another peer, as p2pd tells it."""
    text_of(data)
    found = address_from_bytes(data, A)
    if found is None:
        raise ProtocolError("nobody could dial it")
    return found


TARGETS = {
    "frame-prefix": Target(
        decode=prefix,
        refuses=(ProtocolError,),
        seeds=lambda: [stream.encode_head({"a": 1}, size)[:16] for size in (0, 1000, 1 << 30)],
        max_len=32,
    ),
    "frame-header": Target(
        decode=header,
        refuses=(ProtocolError,),
        seeds=lambda: packed(*HEADERS),
        holds=same(lambda found: head_of(found)[16:], header),
    ),
    "protobuf": Target(decode=read_fields, refuses=(ValueError,), seeds=slots, max_len=512),
    "credit": Target(
        decode=credit_in, refuses=(ProtocolError,), seeds=lambda: packed(HEADERS[0]), holds=grants
    ),
    "advert": Target(
        decode=advert,
        refuses=(ProtocolError,),
        seeds=lambda: packed(*(one.to_map() for one in ADVERTS)),
        holds=is_advert,
    ),
    "note": Target(
        decode=note, refuses=(ProtocolError,), seeds=lambda: map(note_of, NOTES), holds=same(note_of, note)
    ),
    "dht-record": Target(decode=record, refuses=(ProtocolError,), seeds=records, holds=is_record),
    "hello-answer": Target(
        decode=hello,
        refuses=(ProtocolError,),
        seeds=lambda: packed({"wall": 1.7e9, "connections": 1}, {"wall": 17, "connections": 0}),
        holds=compares,
    ),
    "dialback": Target(
        decode=dialback, refuses=(RemoteError,), seeds=lambda: packed(*DIALBACKS), holds=can_be_told
    ),
    "invitation": Target(
        decode=door,
        refuses=(ProtocolError,),
        seeds=lambda: packed({"port": 31331, "certificate": b"\x11" * 32, "ticket": b"\x22" * TICKET_BYTES}),
        holds=can_be_opened,
        max_len=256,
    ),
    "reservation": Target(decode=slot, refuses=(RemoteError,), seeds=slots, max_len=512),
    "certificate": Target(
        decode=proves,
        refuses=(ProtocolError,),
        seeds=lambda: [certificate(known())],
        holds=is_known,
        max_len=2048,
    ),
    "address": Target(
        decode=address,
        refuses=(LocalError,),
        seeds=lambda: [place.encode() for place in PLACES],
        holds=can_be_dialled,
        max_len=600,
    ),
    "address-bytes": Target(
        decode=reported,
        refuses=(ProtocolError,),
        seeds=lambda: [parse_address(place).transport_bytes() for place in PLACES],
        max_len=600,
    ),
}
