"""DHT records: signed by a peer under its own id, small, soon to expire, and stored within bounds.

hivemind 1.1.12 by itself lets a plain value wipe a dictionary of signed ones, binds no key to a peer id,
stores every signed record without limit, and believes what an answer says about itself. Every hetpeer node
checks what it stores and reads with `OwnerValidator`: a key holds one value for each peer, put there by it.

A record on the wire is one msgpack map, which any client of hivemind's decodes, with these entries in this
order:

    "key"        the writer's public key (DER), as bytes
    "signature"  as bytes
    "record"     the value, a map

The signature covers key, subkey, expiration and the bytes of the value as they lie there: no record can be
replayed elsewhere or later.

A key holds MAX_RECORDS (table.py). All keys that this node does not use itself (foreign keys) share
MAX_FOREIGN_RECORDS. A record without room is refused; stored records keep their place. Nothing is cached: a
cached value with a later expiration would replace a stored one. An answer's claims about a key's whole value
are ignored: each record in it is checked, and used if it is valid.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Collection
from typing import Any

import msgpack
from hivemind.dht import protocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import TimedStorage, ValueWithExpiration

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.runtime import Clock
from hetpeer.dht.base.untrusted import decode_map
from hetpeer.dht.identity.peer_identity import MAX_KEY_BITS, MAX_PUBLIC_BYTES, Identity, peer_id_of, verify
from hetpeer.dht.kademlia.table import MAX_PAYLOAD, MAX_RECORDS, MAX_TTL_S, KnownKeys

MAX_KEY = 2**16 - 1
"""Bytes of a key and of a subkey: hivemind's have 20 and are not checked by it."""
MAX_ENVELOPE = 64 + MAX_PUBLIC_BYTES + MAX_KEY_BITS // 8
"""Bytes of a record around its value, with the longest public key and signature."""
_KEY, _SIGNATURE, _RECORD = "key", "signature", "record"
_HEAD: bytes = msgpack.Packer().pack_map_header(3)
_DOMAIN = b"hetpeer DHT record 2\0"
_DICTIONARY = 0x50
"""hivemind's msgpack extension for the records of a key."""
MAX_FOREIGN_RECORDS = 8192
"""Records under all foreign keys together: about 30 MB."""
RECOUNT_S = 1.0
"""Seconds between counts of foreign records when there is no room: some may have expired."""
_SLACK = 64
"""Outdated heap entries allowed, besides as many as there are valid ones."""


class OwnerValidator(RecordValidatorBase):  # type: ignore[misc]
    """Signs our records and checks everybody's; never raises on a foreign one. `keys`: those in use here."""

    def __init__(self, identity: Identity, clock: Clock, keys: KnownKeys) -> None:
        self.clock = clock
        self.keys = keys
        self._identity = identity

    def sign_value(self, record: DHTRecord) -> bytes:
        """Our envelope around `record.value`; it is valid only where the subkey is our own peer id."""
        signature = self._identity.sign(_signed_bytes(record, record.value))
        entries = (_KEY, self._identity.public_bytes, _SIGNATURE, signature, _RECORD)
        return b"".join((_HEAD, *map(msgpack.packb, entries), record.value))

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record may be stored or believed. Any bytes may be passed in."""
        valid = self._is_valid(record)
        if not valid:
            self.keys.refuse(record.key)
        return valid

    def _is_valid(self, record: DHTRecord) -> bool:
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
    """(public key, signature, payload); None if `value` is no envelope. The payload may be anything."""
    if len(value) > MAX_ENVELOPE + MAX_PAYLOAD:
        return None
    reader = msgpack.Unpacker(max_ext_len=0)
    try:
        reader.feed(value)
        if reader.read_map_header() != 3 or reader.unpack() != _KEY:
            return None
        public_bytes = reader.unpack()
        if reader.unpack() != _SIGNATURE:
            return None
        signature = reader.unpack()
        if reader.unpack() != _RECORD:
            return None
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return None
    if not isinstance(public_bytes, bytes) or not isinstance(signature, bytes):
        return None
    return public_bytes, signature, value[reader.tell() :]


def _signed_bytes(record: DHTRecord, payload: bytes) -> bytes:
    lengths = struct.pack("<HHd", len(record.key), len(record.subkey), record.expiration_time)
    return b"".join((_DOMAIN, lengths, record.key, record.subkey, payload))


class RecordStorage(DHTLocalStorage):  # type: ignore[misc]
    """Records of other peers, by key and peer."""

    def __init__(self, keys: KnownKeys, clock: Clock) -> None:
        super().__init__()
        self._keys = keys
        self._clock = clock
        self._foreign = 0
        """An upper bound of the number of foreign records."""
        self._counted_at = -math.inf

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """False for a value without subkey: a plain value must not wipe everybody's records."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """False if there is no room, or the record is not newer than the stored one."""
        item = self.get(key)
        held = None if item is None else item.value
        before = None if held is None else held.get(subkey)
        if before is not None:
            if before.expiration_time >= expiration_time:
                return False  # hivemind would let the newer one expire with the older
        elif not self._has_room(key, 0 if held is None else len(held)):
            return False
        stored = bool(super().store_subkey(key, subkey, value, expiration_time))
        _tidy(self)
        if key in self.data:
            _tidy(self.data[key].value)
        return stored

    def _has_room(self, key: DHTID, held: int) -> bool:
        """Whether one more record fits under `key`, which has `held`; counts it if the key is foreign."""
        if held >= MAX_RECORDS:
            return False
        if key.to_bytes() in self._keys:
            return True
        now = self._clock.monotonic()
        if self._foreign >= MAX_FOREIGN_RECORDS and now - self._counted_at >= RECOUNT_S:
            self._counted_at = now
            foreign = (item.value for key, item in self.items() if key.to_bytes() not in self._keys)
            self._foreign = sum(map(len, foreign))
        if self._foreign >= MAX_FOREIGN_RECORDS:
            return False
        self._foreign += 1
        return True


class NoCache(DHTLocalStorage):  # type: ignore[misc]
    """A cache that takes nothing."""

    def store(self, *_: Any, **__: Any) -> bool:
        """Store nothing."""
        return False

    def store_subkey(self, *_: Any, **__: Any) -> bool:
        """Store nothing."""
        return False


class ForeignDictionary(DictionaryDHTValue):  # type: ignore[misc]
    """The records of a key as another node packs them; those of foreign types are left out.

    hivemind orders subkeys in a heap: it cannot read a dictionary with a text and a number among them, and
    then drops the whole answer, and the node that gave it.
    """

    @classmethod
    def unpackb(cls, raw: bytes) -> ForeignDictionary:
        """The dictionary in `raw`; raises what a wrong form does, which hivemind takes for no answer."""
        _, _, items = MSGPackSerializer.loads(raw)
        read = cls()
        with read.freeze():
            for subkey, value, expires in items:
                if isinstance(subkey, str) and isinstance(value, bytes) and isinstance(expires, float):
                    read.store(subkey, value, expires)
        return read


class Serializer(MSGPackSerializer):  # type: ignore[misc]
    """hivemind's serializer, which reads dictionaries as `ForeignDictionary`."""

    _ext_type_codes = MSGPackSerializer._ext_type_codes | {_DICTIONARY: ForeignDictionary}  # noqa: SLF001
    _ext_types = MSGPackSerializer._ext_types | {ForeignDictionary: _DICTIONARY}  # noqa: SLF001


class DHTProtocol(protocol.DHTProtocol):  # type: ignore[misc]
    """hivemind's protocol. It keeps the name, after which its handlers are named on the wire."""

    serializer = Serializer

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> DHTProtocol:
        """Hivemind's protocol with our storage, and without a cache."""
        made: DHTProtocol = await super().create(*args, **kwargs)
        rule: OwnerValidator = made.record_validator
        made.storage, made.cache = RecordStorage(rule.keys, rule.clock), NoCache()
        return made

    async def call_find(self, peer: Any, keys: Collection[DHTID]) -> dict[DHTID, Any] | None:
        """Ask `peer`, but ignore the answer's own expiration: hivemind would then ask nobody else."""
        found = await super().call_find(peer, keys)
        if found is None:
            return None
        return {key: (_believed(value), nearest) for key, (value, nearest) in found.items()}

    async def call_store(self, *args: Any, **kwargs: Any) -> list[bool] | None:
        """Ask a peer to store records; None, as for no answer, if it refuses all of them.

        hivemind would count it as one that stores them, and take its refusal for that of all nodes.
        """
        said: list[bool] | None = await super().call_store(*args, **kwargs)
        return said if said is not None and any(said) else None

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        """Remove invalid records, which would hide others; False: none left, or more than MAX_RECORDS.

        A node of hivemind's own takes anything. So what is no envelope does not count, however much it is.
        """
        envelopes = 0
        for subkey, (value, _) in list(dictionary.data.items()):
            if _open(value) is None:
                del dictionary[subkey]
                self.record_validator.keys.refuse(key_bytes)
            else:
                envelopes += 1
        if envelopes > MAX_RECORDS:
            return False
        for subkey, (value, expiration_time) in list(dictionary.data.items()):
            record = DHTRecord(key_bytes, self.serializer.dumps(subkey), value, expiration_time)
            if not self.record_validator.validate(record):
                del dictionary[subkey]
        return bool(dictionary.data)


def _believed(answer: ValueWithExpiration | None) -> ValueWithExpiration | None:
    """The records of an answer; they expire together with the last of them."""
    if answer is None or not isinstance(answer.value, DictionaryDHTValue):
        return None
    records = DictionaryDHTValue()
    for subkey, (value, expiration_time) in answer.value.data.items():
        records.store(subkey, value, expiration_time)
    return ValueWithExpiration(records, records.latest_expiration_time) if records else None


def _tidy(storage: TimedStorage) -> None:
    """Rebuild an outdated heap: hivemind adds an entry at each renewal and keeps it until the old expiry."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + _SLACK:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)
