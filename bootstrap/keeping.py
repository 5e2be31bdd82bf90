"""The checkpoints that a reliable peer keeps: it collects them from volunteers while it leads, and has those that others sealed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from hetpeer.bootstrap.checkpoints import CheckpointStore, Record, initial_record
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.bootstrap.serving import Served, fetch
from hetpeer.dht.errors import RemoteError
from hetpeer.dht.node import Node
from hetpeer.stages.execution.state import element_count

STATE_OVERHEAD = 1 << 20
"""Bytes a state file may have beyond its three float32 vectors."""


class Checkpoints:
    """On the disk of the peer that `node` is; `records` are those of the log."""

    def __init__(self, node: Node, run: RunDirectory, records: Iterable[Record]) -> None:
        self._node = node
        layouts = run.layouts()
        self._limits = [12 * element_count(layout) + STATE_OVERHEAD for layout in layouts]
        self._store = CheckpointStore(run, layouts)
        self._sealed: list[Record] = [initial_record(run.manifest)]
        self._sealed += [record for record in records if record["kind"] == "checkpoint"]

    async def collect(
        self, version: int, savers: Mapping[int, str], saved: Callable[[int, str], None]
    ) -> None:
        """Fetch the state of every block from its saver, check it and write it; `saved` is told block and digest.

        Raises `RemoteError` or `LocalError` HP-DISK-* at the first that cannot be had; what is there is of use to nobody.
        """
        self._store.begin(version)
        for block, saver in savers.items():
            name = f"state/{version}/{block}"
            data, facts = await fetch(self._node, saver, name, self._limits[block])
            digest = str(facts.get("digest", ""))
            await asyncio.to_thread(self._store.put, version, block, bytes(data), digest)
            saved(block, digest)

    async def copy(self, record: Record, sources: Iterable[str]) -> None:
        """Fetch a checkpoint that another reliable peer has sealed. Raises `RemoteError`, `LocalError` HP-DISK-*."""
        version = int(record["version"])
        self._store.begin(version)
        for block, digest in enumerate(record["blocks"]):
            data = await self._first(sources, f"state/{version}/{block}", self._limits[block])
            await asyncio.to_thread(self._store.put, version, block, data, digest)

    async def _first(self, sources: Iterable[str], name: str, limit: int) -> bytes:
        last = RemoteError("HP-SYNC-001", f"nobody has {name}")
        for peer in sources:
            try:
                data, _ = await fetch(self._node, peer, name, limit)
                return bytes(data)
            except RemoteError as error:
                last = error
        raise last

    def has(self, record: Record) -> bool:
        """Whether all files of a checkpoint are here."""
        return self._store.has(record)

    def sealed(self, record: Record) -> None:
        """A checkpoint is decided: older ones but one may go."""
        self._sealed.append(record)
        self._store.prune(self._sealed)

    async def state(self, version: int, block: int) -> Served | None:
        """The state of a checkpoint, for whoever joins."""
        record = next((r for r in reversed(self._sealed) if r["version"] == version), None)
        if record is None or not 0 <= block < len(self._limits) or not self._store.has(record, block):
            return None
        data = await asyncio.to_thread(self._store.load, record, block)
        return Served(data, {"digest": record["blocks"][block]})
