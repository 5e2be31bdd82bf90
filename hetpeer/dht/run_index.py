"""The runs of a DHT: each reliable peer says in which run it is, so that any node of the DHT is a way in.

An entry is a claim that anybody can make. It only tells whose peers to ask: the run's manifest proves which
run it is (peer/arrival/manifest_fetch.py).
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.kademlia.table import SHARDS, is_of, shard_of
from hetpeer.dht.node.node import Node

INDEX_VERSION = 1
ENTRY_TTL_S = 90.0
REGISTER_S = 20.0
"""Seconds between two entries of a peer."""

_log = logging.getLogger(__name__)


class RunEntry(BaseModel):
    """A peer's claim to be in the run with the id `run`."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class RunIndex:
    """The runs that are registered in the DHT of `node`.

    index = RunIndex(node)
    await index.register(run_id)
    runs = await index.read()  # ids
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._keys = [f"hetpeer/{INDEX_VERSION}/runs/{shard}" for shard in range(SHARDS)]
        self._key = self._keys[shard_of(node.peer_id)]
        for shard, key in enumerate(self._keys):
            node.dht.declare(key, partial(is_of, shard))

    async def register(self, run_id: str) -> bool:
        """Say for ENTRY_TTL_S seconds that we are in this run; False if no node took it.

        Raises `RemoteError` on a timeout.
        """
        return await self._node.dht.store(self._key, RunEntry(run=run_id).model_dump(), ttl_s=ENTRY_TTL_S)

    async def register_forever(self, run_id: str) -> None:
        """Register again and again. Never returns; what fails is tried again at the next turn."""
        while True:
            try:
                if not await self.register(run_id):
                    _log.debug("the run is not registered: no node took the entry")
            except RemoteError as error:
                _log.debug("the run is not registered: %s", error)
            await asyncio.sleep(REGISTER_S)

    async def read(self) -> list[str]:
        """Ids of the registered runs, in alphabetical order. Raises `RemoteError` on a timeout."""
        found = await self._node.dht.get(self._keys)
        runs: set[str] = set()
        for values in found.values():
            for peer_id, value in values.items():
                try:
                    runs.add(RunEntry.model_validate(value).run)
                except ValidationError:
                    _log.debug("left out an entry of %s", peer_id)
        return sorted(runs)
