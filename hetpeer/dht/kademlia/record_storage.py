"""What our DHT node keeps for others and believes of others: hivemind's protocol and storage, with bounds.

hivemind 1.1.12 keeps whatever is signed, as much of it as comes, and believes what an answer says of itself. Here a key has room for
so many records (known_keys.py), and all keys that this node does not know share room for so many; what has no room is refused, and who has a
place keeps it. Nothing is cached: what is put into a node's cache with a later expiration takes the place of what it stores. Of an answer
the records count that are valid each by itself, and none of what it says of all of them together.
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
"""Under all keys that this node does not know: about 30 MB."""
RECOUNT_S = 1.0
"""How often foreign records are counted anew when there is no room: some may have expired."""
_SLACK = 64
"""Entries of a heap that may be out of date, besides as many as are valid."""


class RecordStorage(DHTLocalStorage):  # type: ignore[misc]
    """Records of others, by key and peer."""

    def __init__(self, keys: KnownKeys, clock: Clock) -> None:
        super().__init__()
        self._keys = keys
        self._clock = clock
        self._foreign = 0
        """At least as many as there are."""
        self._counted_at = -math.inf

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """False for what has no subkey: nobody's records are wiped by a plain value."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """False where there is no room, or the record is not newer than the one that is there."""
        item = self.get(key)
        held = None if item is None else item.value
        before = None if held is None else held.get(subkey)
        if before is not None:
            if before.expiration_time >= expiration_time:
                return False  # hivemind would let the newer one expire when the older does
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
    """Takes nothing."""

    def store(self, *_: Any, **__: Any) -> bool:
        return False

    def store_subkey(self, *_: Any, **__: Any) -> bool:
        return False


class DHTProtocol(protocol.DHTProtocol):  # type: ignore[misc]
    """hivemind's, whose name it bears, as its handlers are named after it on the wire."""

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> DHTProtocol:
        made: DHTProtocol = await super().create(*args, **kwargs)
        rule: OwnerValidator = made.record_validator
        made.storage, made.cache = RecordStorage(rule.keys, rule.clock), NoCache()
        return made

    async def call_find(self, peer: Any, keys: Collection[DHTID]) -> dict[DHTID, Any] | None:
        """As hivemind's. It would believe a peer that its records are valid for ever, and then ask nobody else."""
        found = await super().call_find(peer, keys)
        if found is None:
            return None
        return {key: (_believed(value), nearest) for key, (value, nearest) in found.items()}

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        """Leave the valid ones in `dictionary`: one bad record hides no others. False if there are none, or more than there may be."""
        records = list(dictionary.data.items())
        if len(records) > MAX_RECORDS:
            return False
        for subkey, (value, expiration_time) in records:
            record = DHTRecord(key_bytes, self.serializer.dumps(subkey), value, expiration_time)
            if not self.record_validator.validate(record):
                del dictionary[subkey]
        return bool(dictionary.data)


def _believed(answer: ValueWithExpiration | None) -> ValueWithExpiration | None:
    """The records of an answer, which expire when the last of them does."""
    if answer is None or not isinstance(answer.value, DictionaryDHTValue):
        return None
    records = DictionaryDHTValue()
    for subkey, (value, expiration_time) in answer.value.data.items():
        records.store(subkey, value, expiration_time)
    return ValueWithExpiration(records, records.latest_expiration_time) if records else None


def _tidy(storage: TimedStorage) -> None:
    """Hivemind leaves an entry in the heap each time that a value is renewed, until it would have expired."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + _SLACK:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)
