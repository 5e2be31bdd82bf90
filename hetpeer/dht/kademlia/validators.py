"""The rule for DHT records: signed by a peer under its own id, small, and soon to expire.

hivemind by itself lets a plain value wipe a dictionary of signed ones, binds no key to a peer id, and keeps
records for ever. Every hetpeer node checks what it stores and what it reads with this one rule, so a key can
hold only one value for each peer, put there by that peer.

A record on the wire is an envelope around the msgpack value (all integers little-endian):

    4 bytes  "hpr1"
    u16      length of the public key      u16  length of the signature
    public key (DER), signature, value

The signature covers key, subkey, expiration and value, so no record can be replayed under another key or
later.
"""

from __future__ import annotations

import math
import struct

import msgpack
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from hetpeer.dht.base.clock import Clock
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.identity.peer_identity import Identity, peer_id_of, verify
from hetpeer.dht.kademlia.known_keys import KnownKeys
from hetpeer.dht.streams.frames import decode_map

MAX_PAYLOAD = 2048
"""Bytes of one value."""
MAX_KEY = 2**16 - 1
"""Bytes of a key and of a subkey: hivemind's have 20 and are not checked by it."""
MAX_TTL_S = 120.0
"""Seconds ahead that a record may expire."""
_MAGIC = b"hpr1"
_HEAD = struct.Struct("<4sHH")
_DOMAIN = b"hetpeer DHT record 1\0"


class OwnerValidator(RecordValidatorBase):  # type: ignore[misc]
    """Signs our records and checks everybody's; never raises on a foreign record. `keys`: those
    in use here.
    """

    def __init__(self, identity: Identity, clock: Clock, keys: KnownKeys) -> None:
        self.clock = clock
        self.keys = keys
        self._identity = identity

    def sign_value(self, record: DHTRecord) -> bytes:
        """Our envelope around `record.value`; it is valid only where the subkey is our own peer id."""
        public_bytes = self._identity.public_bytes
        signature = self._identity.sign(_signed_bytes(record, record.value))
        return (
            _HEAD.pack(_MAGIC, len(public_bytes), len(signature))
            + public_bytes
            + signature
            + bytes(record.value)
        )

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record may be stored or believed. Any bytes may be passed in."""
        expires = record.expiration_time
        if not isinstance(expires, float) or not isinstance(record.value, bytes):
            return False  # msgpack carries anything
        if len(record.key) > MAX_KEY:
            return False
        if not math.isfinite(expires) or expires > self.clock.wall() + MAX_TTL_S:
            return False
        envelope = _open(record.value)
        if envelope is None:
            return False
        public_bytes, signature, payload = envelope
        peer_id = peer_id_of(public_bytes)
        if record.subkey != msgpack.packb(peer_id):  # also refuses values without a subkey
            return False
        if not self.keys.admits(record.key, peer_id):
            return False
        try:
            decode_map(payload, limit=MAX_PAYLOAD)
        except ProtocolError:
            return False
        return verify(public_bytes, _signed_bytes(record, payload), signature)

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value inside an envelope that `validate` accepted."""
        envelope = _open(record.value)
        return envelope[2] if envelope is not None else record.value


def _open(value: bytes) -> tuple[bytes, bytes, bytes] | None:
    """(public key, signature, payload); None if `value` is no envelope."""
    if len(value) < _HEAD.size:
        return None
    magic, key_length, signature_length = _HEAD.unpack_from(value)
    key_end = _HEAD.size + key_length
    payload_start = key_end + signature_length
    if magic != _MAGIC or payload_start > len(value):
        return None
    return value[_HEAD.size : key_end], value[key_end:payload_start], value[payload_start:]


def _signed_bytes(record: DHTRecord, payload: bytes) -> bytes:
    lengths = struct.pack("<HHd", len(record.key), len(record.subkey), record.expiration_time)
    return b"".join((_DOMAIN, lengths, record.key, record.subkey, payload))
