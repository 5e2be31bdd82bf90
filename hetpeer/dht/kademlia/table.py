"""The DHT as the rest of the project sees it: signed, expiring values, one per peer under each key.

It advertises and never decides: a `True` from `store` is no proof of publication, readers may see different values,
and anything here is gone when its time is up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from hetpeer.dht.base.clock import Clock
from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.kademlia.known_keys import Admits, KnownKeys

if TYPE_CHECKING:
    from hetpeer.dht.kademlia.network_session import NetworkSession

DEADLINE_S = 15.0
"""For one operation; each of hivemind's calls to a peer waits 3 s at most."""


class Table:
    """Values of all peers under string keys. Operations wait while p2pd restarts, DEADLINE_S at most."""

    def __init__(
        self, session: Callable[[], Awaitable[NetworkSession]], peer_id: str, clock: Clock, keys: KnownKeys
    ) -> None:
        self._session = session
        self._peer_id = peer_id
        self._clock = clock
        self._keys = keys

    def declare(self, key: str, admits: Admits) -> None:
        """`key` is in use here: there is room for its values, and only those count that are of peers whom it `admits`."""
        self._keys.declare(key, admits)

    async def store(self, key: str, value: Mapping[str, Any], *, ttl_s: float) -> bool:
        """Put our own value under `key` for `ttl_s` seconds, replacing an earlier one; False when it was refused.

        A value is a map that `frames.decode_map` accepts, of at most `validators.MAX_PAYLOAD` bytes.
        """
        expires_at = self._clock.wall() + ttl_s
        async with _deadline():
            dht = (await self._session()).dht
            return bool(await dht.store(key, dict(value), expires_at, subkey=self._peer_id))

    async def get(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """For each key the newest values, by the id of the peer that signed them; keys without values are left out."""
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
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield
    except TimeoutError:
        raise RemoteError(
            "HP-NET-012",
            f"the DHT did not answer within {DEADLINE_S:.0f} s",
            why="the peers that hold its records are gone, or the line is very slow",
            fix="try again in a minute, or join by another peer",
        ) from None
