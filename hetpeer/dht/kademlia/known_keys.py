"""The DHT keys in use at this node, and which peers may have a record under each. Pure.

All records under one key travel in one message, of which libp2p's unary calls carry 4 MiB; a longer one is no
answer at all. So a key holds MAX_RECORDS, and records of many peers are spread over SHARDS keys. hivemind
asks for √SHARDS of them in one call: 4 keys of 256 records of 3,655 bytes (with the longest accepted key and
signature) are 3.6 MiB. 16 shards of 256 have room for 4,096 peers; of 3,000 peers with random ids a shard
gets 188 ± 13, and 256 is five standard deviations away.

An attacker who fills a shard with identities of his own hides newcomers in that shard only: a peer with a
record keeps its place as long as it renews the record. An id belongs to one shard of the roster, so 256 ids
fill one shard and not all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgpack

SHARDS = 16
MAX_RECORDS = 256
"""Records under one key, at one node, and in one answer."""

Admits = Callable[[str], bool]


def shard_of(peer_id: str) -> int:
    """The one shard for a peer's record, where peers are spread by their ids."""
    return hashlib.sha256(peer_id.encode()).digest()[0] % SHARDS


class KnownKeys:
    """Keys of the runs that this node takes part in or watches; all other keys are foreign."""

    def __init__(self) -> None:
        self._admits: dict[bytes, Admits] = {}

    def declare(self, key: str, admits: Admits) -> None:
        """Take `key` into use; `admits` tells which peers may have a record under it."""
        self._admits[digest(key)] = admits

    def __contains__(self, key: bytes) -> bool:
        """Whether the key with this digest is in use here."""
        return key in self._admits

    def admits(self, key: bytes, peer_id: str) -> bool:
        """Whether `peer_id` may have a record under the key with this digest; True for foreign keys."""
        admits = self._admits.get(key)
        return admits is None or admits(peer_id)


def digest(key: str) -> bytes:
    """Position of `key` in the DHT: hivemind's `DHTID.generate`, 20 bytes."""
    return hashlib.sha1(msgpack.packb(key), usedforsecurity=False).digest()
