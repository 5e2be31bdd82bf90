"""The DHT for the rest of the project: signed, expiring values, one for each peer under each key.

It advertises and never decides: a `True` from `store` is no proof of publication, readers may see different
values, and every value disappears when its time is up.

All records under one key travel in one message. libp2p's unary calls carry 4 MiB and drop longer ones. So a
key holds MAX_RECORDS, and records of many peers are spread over SHARDS keys. hivemind
asks for √SHARDS of them in one call: 4 keys of 256 records of 3,709 bytes (with the longest accepted key and
signature) are 3.6 MiB. 16 shards of 256 have room for 4,096 peers; of 3,000 peers with random ids a shard
gets 188 ± 13, and 256 is five standard deviations away.

An attacker who fills a shard with identities of his own hides newcomers in that shard only: a peer with a
record keeps its place as long as it renews it. An id belongs to one shard, so 256 ids do not fill all.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgpack

from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.base.runtime import Clock

if TYPE_CHECKING:
    from hetpeer.dht.kademlia.network_session import NetworkSession

SHARDS = 16
MAX_RECORDS = 256
"""Records under one key, at one node, and in one answer."""
MAX_PAYLOAD = 2048
"""Bytes of one value."""
MAX_TTL_S = 120.0
"""Seconds ahead that a record may expire."""
LATER_S = 0.001
"""Seconds that a record expires after the one before, at least."""

_log = logging.getLogger(__name__)

Admits = Callable[[str], bool]
DEADLINE_S = 15.0
"""Deadline of one operation; each of hivemind's calls to a peer waits 3 s at most."""


def shard_of(peer_id: str) -> int:
    """Number of the shard for the record of `peer_id`; ids are spread by their hash."""
    return hashlib.sha256(peer_id.encode()).digest()[0] % SHARDS


def is_of(shard: int, peer_id: str) -> bool:
    """Whether the record of `peer_id` belongs to `shard`."""
    return shard_of(peer_id) == shard


class KnownKeys:
    """Keys of the runs that this node takes part in or watches; all other keys are foreign."""

    def __init__(self) -> None:
        self._admits: dict[bytes, Admits] = {}
        self.refused = 0
        """Records under these keys that were not believed, each time that one was offered."""

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

    def refuse(self, key: bytes) -> None:
        """Count a record that is not believed, unless the key is foreign; the log tells of the first one."""
        if key not in self._admits:
            return
        if not self.refused:
            _log.info("the DHT has records under this run's keys that its peers did not write: ignored")
        self.refused += 1


def digest(key: str) -> bytes:
    """Position of `key` in the DHT: hivemind's `DHTID.generate`, 20 bytes."""
    return hashlib.sha1(msgpack.packb(key), usedforsecurity=False).digest()


class Table:
    """Values of all peers under string keys. Operations wait while p2pd restarts, at most DEADLINE_S.

    It is a Kademlia table (Maymounkov and Mazières 2002, section 2) in hivemind's implementation.

        node.dht.declare("example/peers", admits=lambda peer_id: True)
        await node.dht.store("example/peers", {"port": 1}, ttl_s=30.0)
        values = await node.dht.get(["example/peers"])  # key → peer id → map
    """

    def __init__(
        self, session: Callable[[], Awaitable[NetworkSession]], peer_id: str, clock: Clock, keys: KnownKeys
    ) -> None:
        self._session = session
        self._peer_id = peer_id
        self._clock = clock
        self._keys = keys
        self._expires: dict[str, tuple[float, float]] = {}
        """Key → when our last record under it expires, and the monotonic time at which it was stored."""

    @property
    def refused(self) -> int:
        """How often a record under a key in use was offered that its peer did not write."""
        return self._keys.refused

    def declare(self, key: str, admits: Admits) -> None:
        """Take `key` into use, with room only for values of peers that it `admits`."""
        self._keys.declare(key, admits)

    async def store(self, key: str, value: Mapping[str, Any], *, ttl_s: float) -> bool:
        """Put our value under `key` for `ttl_s` seconds, in place of an earlier one; False if refused.

        A value: a map for `untrusted.decode_map`, at most MAX_PAYLOAD bytes. It lives longer where
        it would expire before the earlier one. Raises HP-NET-012.
        """
        expires_at = self._expiration(key, ttl_s)
        async with _deadline():
            dht = (await self._session()).dht
            return bool(await dht.store(key, dict(value), expires_at, subkey=self._peer_id))

    def _expiration(self, key: str, ttl_s: float) -> float:
        """Wall time at which our next record under `key` expires: after our last one, whatever the clock is.

        A node of hivemind's own refuses a record that expires earlier, and loses the one that it keeps once
        the refused expiration has passed. No record expires later than MAX_TTL_S from now: everybody would
        refuse it, as they have refused the earlier ones if the clock was ahead by that much.
        """
        wall, now = self._clock.wall(), self._clock.monotonic()
        expires_at = wall + ttl_s
        if key in self._expires:
            last, stored_at = self._expires[key]
            expires_at = max(expires_at, last + max(now - stored_at, LATER_S))
        expires_at = min(expires_at, wall + MAX_TTL_S)
        self._expires[key] = expires_at, now
        return expires_at

    async def get(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Key → peer id → its newest signed value, for keys with values. Raises `RemoteError` HP-NET-012."""
        async with _deadline():
            dht = (await self._session()).dht
            found = await dht.get_many(keys, sufficient_expiration_time=float("inf"))
        return {
            key: {peer_id: entry.value for peer_id, entry in item.value.items()}
            for key, item in found.items()
            if item is not None and isinstance(item.value, dict)
        }


@asynccontextmanager
async def _deadline() -> AsyncIterator[None]:
    """Limit an operation to DEADLINE_S. Raises `RemoteError` HP-NET-012."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield
    except TimeoutError:
        raise RemoteError(
            "HP-NET-012",
            f"the DHT did not answer within {DEADLINE_S:.0f} s",
            why="the peers that hold its records are lost, or the connection is very slow",
            fix="try again in a minute, or join by another peer",
        ) from None
