"""The roster: adverts of all peers of one run, spread over a few DHT keys.

Peers are spread over the keys by their ids (known_keys.py). The wire version is part of the key, so that
versions that would misread each other do not meet.
"""

from __future__ import annotations

import logging
from functools import partial

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.kademlia.adverts import Advert
from hetpeer.dht.kademlia.known_keys import SHARDS, shard_of
from hetpeer.dht.node.node import Node

WIRE_VERSION = 2
DEFAULT_TTL_S = 30.0

_log = logging.getLogger(__name__)


class Roster:
    """The adverts of run `run_id`, seen from `node`.

    roster = Roster(node, run_id)
    await roster.publish(Advert(name="ada"))
    adverts = await roster.read()  # peer id → Advert
    """

    def __init__(self, node: Node, run_id: str) -> None:
        self._node = node
        self._prefix = f"hetpeer/{WIRE_VERSION}/{run_id}/peers"
        for shard in range(SHARDS):
            node.dht.declare(f"{self._prefix}/{shard}", partial(_is_of, shard))

    async def publish(self, advert: Advert, *, ttl_s: float = DEFAULT_TTL_S) -> bool:
        """Show `advert` as ours for `ttl_s` seconds; False if no node took it. Raises `RemoteError` on a
        timeout.
        """
        return await self._node.dht.store(self._key(self._node.peer_id), advert.to_map(), ttl_s=ttl_s)

    async def read(self) -> dict[str, Advert]:
        """Peer id → newest advert; invalid adverts are left out. Raises `RemoteError` on a timeout."""
        found = await self._node.dht.get([f"{self._prefix}/{shard}" for shard in range(SHARDS)])
        adverts: dict[str, Advert] = {}
        for values in found.values():
            for peer_id, value in values.items():
                try:
                    adverts[peer_id] = Advert.from_map(value, peer=peer_id)
                except ProtocolError as error:
                    _log.debug("left out an advert: %s", error)
        return adverts

    def _key(self, peer_id: str) -> str:
        return f"{self._prefix}/{shard_of(peer_id)}"


def _is_of(shard: int, peer_id: str) -> bool:
    return shard_of(peer_id) == shard
