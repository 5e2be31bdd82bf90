"""The keys of the DHT that this node knows, and who may have a record under each. Pure.

All records under one key travel in one message, of which libp2p's unary calls carry 4 MiB; a longer one is no answer at all. So a
key holds MAX_RECORDS, and what many peers say is spread over SHARDS keys. hivemind asks for √SHARDS of them in one call: 4 keys of 256
records of 3,655 bytes (with the longest key and signature that are taken) are 3.6 MiB. 16 shards of 256 have room for 4,096 peers; of 3,000 whose
ids fall where chance has it, a shard gets 188 ± 13, and one of 256 is five standard deviations away.

Who fills a shard with identities of its own hides newcomers in that shard, and nobody else: who is there stays as long as it renews its
record. An id belongs to one shard of the roster, so that 256 ids fill one, and not all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgpack

SHARDS = 16
MAX_RECORDS = 256
"""Under one key, at one node, and in one answer."""

Admits = Callable[[str], bool]


def shard_of(peer_id: str) -> int:
    """The one shard in which a peer may be, where peers are spread by their ids."""
    return hashlib.sha256(peer_id.encode()).digest()[0] % SHARDS


class KnownKeys:
    """Those of the runs that this node takes part in or looks at; any others are foreign to it."""

    def __init__(self) -> None:
        self._admits: dict[bytes, Admits] = {}

    def declare(self, key: str, admits: Admits) -> None:
        """`key` is in use here, and `admits` says which peers may have a record under it."""
        self._admits[digest(key)] = admits

    def __contains__(self, key: bytes) -> bool:
        """Whether the key with this digest is in use here."""
        return key in self._admits

    def admits(self, key: bytes, peer_id: str) -> bool:
        """Whether `peer_id` may have a record under the key with this digest. Of a foreign key nobody knows."""
        admits = self._admits.get(key)
        return admits is None or admits(peer_id)


def digest(key: str) -> bytes:
    """Where `key` is in the DHT: hivemind's `DHTID.generate`, 20 bytes."""
    return hashlib.sha1(msgpack.packb(key), usedforsecurity=False).digest()
