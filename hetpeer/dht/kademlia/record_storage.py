"""Bounded storage of DHT records, and bounded trust in answers: subclasses of hivemind's protocol and
storage.

hivemind 1.1.12 stores every signed record without limit, and believes what an answer says about itself. Here
a key holds MAX_RECORDS (known_keys.py), and all foreign keys share MAX_FOREIGN_RECORDS. A record without room
is refused; stored records keep their place. Nothing is cached: a cached value with a later expiration would
replace a stored one. Of an answer only the records count that are valid by themselves, and nothing it says
about all of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from typing import Any

from hivemind.dht import protocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.utils.timed_storage import TimedStorage, ValueWithExpiration

from hetpeer.dht.base.clock import Clock
from hetpeer.dht.kademlia.known_keys import MAX_RECORDS, KnownKeys
from hetpeer.dht.kademlia.validators import OwnerValidator

MAX_FOREIGN_RECORDS = 8192
"""Records under all foreign keys together: about 30 MB."""
RECOUNT_S = 1.0
"""Seconds between counts of foreign records when there is no room: some may have expired."""
_SLACK = 64
"""Outdated heap entries allowed, besides as many as there are valid ones."""


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


class DHTProtocol(protocol.DHTProtocol):  # type: ignore[misc]
    """hivemind's protocol. It keeps the name, after which its handlers are named on the wire."""

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> DHTProtocol:
        """Hivemind's protocol with our storage, and without a cache."""
        made: DHTProtocol = await super().create(*args, **kwargs)
        rule: OwnerValidator = made.record_validator
        made.storage, made.cache = RecordStorage(rule.keys, rule.clock), NoCache()
        return made

    async def call_find(self, peer: Any, keys: Collection[DHTID]) -> dict[DHTID, Any] | None:
        """As hivemind's, but an answer's own expiration is not believed: else nobody else would be asked for
        ever.
        """
        found = await super().call_find(peer, keys)
        if found is None:
            return None
        return {key: (_believed(value), nearest) for key, (value, nearest) in found.items()}

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        """Remove invalid records from `dictionary`, so that one bad record hides no others.

        False if none is left, or if there are more than MAX_RECORDS.
        """
        records = list(dictionary.data.items())
        if len(records) > MAX_RECORDS:
            return False
        for subkey, (value, expiration_time) in records:
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
