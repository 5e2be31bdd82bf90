"""The checkpoints that a reliable peer keeps: it collects them from volunteers while it leads, and has those that others sealed.

A checkpoint that is collected is copied by the other reliable peers before it is sealed: most have its files then, so that it is
not gone with the disk of the one that collected it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated, Final

from pydantic import Field

from hetpeer.averaging.messages import Count, Digest, Schema
from hetpeer.bootstrap.checkpoints import CheckpointStore, Record, initial_record, record_of
from hetpeer.bootstrap.decisions import CollectCheckpoint
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.bootstrap.serving import Served, fetch, state_name
from hetpeer.dht.errors import ProtocolError, RemoteError
from hetpeer.dht.listener import CONTROL as CONTROL_BUDGET
from hetpeer.dht.node import Node
from hetpeer.dht.streams import Stream
from hetpeer.dht.tasks import to_its_end
from hetpeer.stages.execution.state import file_bytes

KEEP: Final = "hetpeer/1/keep"
ASK_S = 8.0
KEPT = 2
"""Sealed checkpoints that stay on the disk."""
COPY_S = 600.0
"""A member that takes longer to copy a checkpoint does not count."""

_log = logging.getLogger(__name__)


class _Keep(Schema):
    """What one reliable peer asks of another: to have the files of this checkpoint too."""

    version: Count
    cluster: Count = 0
    blocks: Annotated[tuple[Digest, ...], Field(min_length=1, max_length=1 << 12)]


class Checkpoints:
    """On the disk of the peer that `node` is; `records` are those of the log, `company` the other reliable peers."""

    def __init__(
        self,
        node: Node,
        run: RunDirectory,
        records: Iterable[Record],
        company: Callable[[], Collection[str]],
    ) -> None:
        self._node = node
        layouts = run.layouts()
        vectors = 1 + len(run.manifest.optimizer_state)
        self._limits = [file_bytes(layout, vectors) for layout in layouts]
        self._store = CheckpointStore(run, layouts)
        self._company = company
        self._initial = initial_record(run.manifest)
        sealed = [record for record in records if record["kind"] == "checkpoint"]
        self._sealed: list[Record] = [self._initial, *sealed][-KEPT:]
        """The last ones."""
        self._collected: Record | None = None
        """Complete, and not sealed yet."""
        self._making = asyncio.Lock()

    async def serve(self) -> None:
        """Copy what the other reliable peers ask us to."""
        await self._node.serve(KEEP, self._asked, CONTROL_BUDGET)

    def is_newest(self, record: Record) -> bool:
        """Whether it is the last of those that are here."""
        return bool(self._sealed[-1]["blocks"] == record["blocks"])

    @property
    def newest(self) -> int:
        """The version of the newest sealed checkpoint."""
        return int(self._sealed[-1]["version"])

    # ── making one ───────────────────────────────────────────────────────────────────────────────────────────────

    async def collect(self, order: CollectCheckpoint, members: Sequence[str]) -> Sequence[str]:
        """Fetch the state of every block from its saver, check it, write it, and have most `members` copy it.

        Returns the blocks' digests. Raises `RemoteError` or `LocalError` HP-DISK-* if it cannot be had or kept.
        """
        version, cluster = order.version, order.line.cluster
        async with self._making:
            self._store.begin(version)
            digests = []
            for block, saver in sorted(order.savers.items()):
                name = state_name(cluster, version, block)
                data, facts = await fetch(self._node, saver, name, self._limits[block])
                digests.append(str(facts.get("digest", "")))
                await to_its_end(self._store.put, version, block, bytes(data), digests[-1])
            self._collected = record_of(version, digests, cluster)
        others = [peer for peer in members if peer != self._node.peer_id]
        keep = _Keep(version=version, cluster=cluster, blocks=tuple(digests))
        await self._kept_by(len(others) - (len(members) - 1) // 2, others, keep)
        return digests

    async def _kept_by(self, enough: int, others: Sequence[str], keep: _Keep) -> None:
        """Return when `enough` of `others` have it. Raises `RemoteError` HP-SYNC-004 when they cannot be had."""
        asked = [asyncio.ensure_future(self._ask(peer, keep)) for peer in others]
        try:
            kept = 0
            for answer in asyncio.as_completed(asked):
                if kept >= enough:
                    return
                kept += await answer
            if kept < enough:
                raise RemoteError(
                    "HP-SYNC-004",
                    f"checkpoint {keep.version} is on {kept + 1} of {len(others) + 1} reliable peers",
                    why="the others cannot be reached, or have no room",
                    fix="nothing: it is tried again; see what they say",
                )
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _ask(self, peer: str, keep: _Keep) -> bool:
        try:
            async with await self._node.open(peer, KEEP) as stream:
                await stream.send(keep.model_dump(mode="json"), timeout_s=ASK_S)
                answer = await stream.receive(timeout_s=COPY_S)
                return bool(answer.header.get("kept"))
        except RemoteError as error:
            _log.info("%s does not copy checkpoint %d: %s", peer[-8:], keep.version, error)
            return False

    async def _asked(self, stream: Stream) -> None:
        if stream.peer_id not in self._company():
            raise ProtocolError("a stranger asks us to keep a checkpoint", peer=stream.peer_id)
        try:
            keep = _Keep.model_validate((await stream.receive(timeout_s=ASK_S)).header)
        except ValueError as error:
            raise ProtocolError("not a request to keep a checkpoint", peer=stream.peer_id) from error
        await self.copy(record_of(keep.version, keep.blocks, keep.cluster), [stream.peer_id])
        await stream.send({"kept": True}, timeout_s=ASK_S)

    async def copy(self, record: Record, sources: Iterable[str]) -> None:
        """Fetch the files of a checkpoint that others have, if they are not here. Raises `RemoteError`, `LocalError` HP-DISK-*."""
        version = int(record["version"])
        async with self._making:
            if self._store.has(record):
                return
            self._store.begin(version)
            for block, digest in enumerate(record["blocks"]):
                name = state_name(record.get("cluster", 0), version, block)
                data = await self._first(sources, name, self._limits[block])
                await to_its_end(self._store.put, version, block, data, digest)

    async def _first(self, sources: Iterable[str], name: str, limit: int) -> bytes:
        last = RemoteError(
            "HP-SYNC-001",
            f"no peer could give {name}",
            why="no peer is known",
            fix="wait for another reliable peer to come back",
        )
        for peer in sources:
            try:
                data, _ = await fetch(self._node, peer, name, limit)
                return bytes(data)
            except RemoteError as error:
                last = error
        raise last

    # ── those that count ─────────────────────────────────────────────────────────────────────────────────────────

    async def sealed(self, record: Record) -> None:
        """A checkpoint is decided: older ones but one may go."""
        self._sealed = [*self._sealed, record][-KEPT:]
        await to_its_end(self._store.prune, self._sealed)

    async def state(self, cluster: int, version: int, block: int) -> Served | None:
        """The state of a checkpoint, for whoever joins or copies it."""
        known = [self._initial, *self._sealed, *filter(None, [self._collected])]
        which = (cluster if version else 0, version)
        record = next((r for r in reversed(known) if (r.get("cluster", 0), r["version"]) == which), None)
        if record is None or not 0 <= block < len(self._limits) or not self._store.has(record, block):
            return None
        data = await asyncio.to_thread(self._store.load, record, block)
        return Served(data, {"digest": record["blocks"][block]})
