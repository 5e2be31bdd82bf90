"""Checkpoint replication between reliable peers.

The leader collects a checkpoint from volunteers. Before it is sealed, a majority of the reliable peers copy
its files, so that it survives the loss of one disk.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Final

from pydantic import Field

from hetpeer.averaging.messages import Count, Digest, Schema
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.state.effects import CollectCheckpoint
from hetpeer.bootstrap.storage.checkpoints import (
    CheckpointStore,
    IncomingState,
    best_of,
    initial_record,
    record_of,
    thinned,
)
from hetpeer.bootstrap.storage.file_service import (
    REQUEST_TIMEOUT_S,
    SLOWEST,
    Served,
    fetch_patiently,
    state_name,
)
from hetpeer.dht.base.errors import LocalError, ProtocolError, RemoteError, short_id
from hetpeer.dht.base.runtime import to_its_end
from hetpeer.dht.node.node import Node
from hetpeer.dht.p2pd.listener import CONTROL as CONTROL_BUDGET
from hetpeer.dht.streams.stream import Stream
from hetpeer.stages.block.state_file import file_bytes

KEEP: Final = "hetpeer/1/keep"
ASK_S = 8.0
KEPT = 2
"""Least number of sealed checkpoints that stay on the disk, and of copies that the leader has not sealed
yet.
"""
OLDER_BYTES = 1 << 30
"""Room for older checkpoints, from which a replay can begin (docs/replay.md)."""
FREE_BYTES = 8 << 30
"""Free room on the disk below which no older checkpoints are kept."""

_log = logging.getLogger(__name__)


class _Keep(Schema):
    """Request to another reliable peer to copy the files of this checkpoint."""

    version: Count
    cluster: Count = 0
    blocks: Annotated[tuple[Digest, ...], Field(min_length=1, max_length=1 << 12)]


class CheckpointReplication:
    """Checkpoints on this peer's disk. `records`: the log so far; `company()`: the other reliable peers.

    `evaluations()`: version → held-out loss; the checkpoint with the lowest stays. None: it is not known.
    """

    def __init__(
        self,
        node: Node,
        run: RunDirectory,
        records: Iterable[Record],
        company: Callable[[], Collection[str]],
        evaluations: Callable[[], Mapping[int, float]] = dict,
    ) -> None:
        self._node = node
        layouts = run.layouts()
        vectors = 1 + len(run.manifest.optimizer_state)
        self._limits = [file_bytes(layout, vectors) for layout in layouts]
        self._store = CheckpointStore(run, layouts)
        self._company = company
        self._evaluations = evaluations
        self._initial = initial_record(run.manifest)
        sealed = [record for record in records if record["kind"] == "checkpoint"]
        known = [self._initial, *sealed]
        self._checkpoints = run.checkpoints
        self._most = KEPT if run.manifest.averaging else KEPT + OLDER_BYTES // max(sum(self._limits), 1)
        """Most sealed checkpoints that are kept."""
        older = [record for record in known[:-KEPT] if self._store.has(record)]
        self._sealed = self._thinned([*older, *known[-KEPT:]])
        """Sealed checkpoints to keep; a file of one may be missing."""
        self._newest = next(filter(self._store.has, reversed(known)), self._initial)
        """Newest sealed checkpoint with all files here."""
        self._collected: Record | None = None
        """Complete checkpoint that is not sealed yet."""
        self._copied: list[Record] = []
        """Newest copies of other peers' checkpoints that are not known to be sealed."""
        self._making = asyncio.Lock()
        self._makers = 0
        """Number of callers that assemble a checkpoint or wait for their turn."""

    async def serve(self) -> None:
        """Serve copy requests of the other reliable peers."""
        await self._node.serve(KEEP, self._asked, CONTROL_BUDGET)

    def is_newest(self, record: Record) -> bool:
        """Whether `record` is the newest checkpoint here."""
        return bool(self._newest["blocks"] == record["blocks"])

    @property
    def best(self) -> int | None:
        """Version of the checkpoint here with the lowest held-out loss; None: none was evaluated."""
        best = best_of(self._sealed, self._evaluations())
        return None if best is None else int(best["version"])

    def _thinned(self, sealed: Sequence[Record], most: int | None = None) -> list[Record]:
        """At most `most` of the `sealed` checkpoints (None: as many as have room), and the best of all."""
        best = best_of(sealed, self._evaluations())
        return thinned(sealed, self._most if most is None else most, KEPT, best)

    @property
    def newest_record(self) -> Record:
        """Record of the newest checkpoint that is complete here."""
        return self._newest

    @property
    def newest(self) -> int:
        """Version of the newest sealed checkpoint here."""
        return int(self._newest["version"])

    # ── making one ──────────────────────────────────────────────────────────────────────────────────────────

    async def collect(self, order: CollectCheckpoint, members: Sequence[str]) -> Sequence[str]:
        """Fetch, check and store every block's state, and have a majority of `members` copy them.

        Returns the blocks' digests. Raises `RemoteError` or `LocalError` HP-DISK-* on failure.
        """
        version, cluster = order.version, order.line.cluster
        self._collected = None
        async with self._begun(version):
            digests = []
            for block, saver in sorted(order.savers.items()):
                name = state_name(cluster, version, block)
                with self._store.incoming() as state:
                    facts = await fetch_patiently(self._node, saver, name, self._limits[block], state)
                    digests.append(str(facts.get("digest", "")))
                    await to_its_end(self._store.put, version, block, state, digests[-1])
            collected = self._collected = record_of(version, digests, cluster)
        others = [peer for peer in members if peer != self._node.peer_id]
        keep = _Keep(version=version, cluster=cluster, blocks=tuple(digests))
        try:
            await self._kept_by(len(others) - (len(members) - 1) // 2, others, keep)
        except BaseException:
            if self._collected is collected:
                self._collected = None
            raise
        return digests

    @asynccontextmanager
    async def _begun(self, version: int, copied: Record | None = None) -> AsyncIterator[None]:
        """Context to make one checkpoint at a time, after a prune that spares `copied`. Raises HP-DISK-*."""
        async with self._alone():
            self._store.begin(version)
            await self._prune(copied)
            yield

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        self._makers += 1
        try:
            async with self._making:
                yield
        finally:
            self._makers -= 1

    async def _prune(self, copied: Record | None = None) -> None:
        if len(self._sealed) > KEPT and shutil.disk_usage(self._checkpoints).free < FREE_BYTES:
            self._sealed = self._thinned(self._sealed, KEPT)
        wanted = [*self._sealed, self._newest, *self._copied, *filter(None, [self._collected, copied])]
        await to_its_end(self._store.prune, wanted)

    async def _kept_by(self, enough: int, others: Sequence[str], keep: _Keep) -> None:
        """Return when `enough` of `others` have copied `keep`. Raises `RemoteError` HP-SYNC-004."""
        # They all fetch over one uplink.
        timeout_s = REQUEST_TIMEOUT_S + len(others) * sum(self._limits) / SLOWEST
        asked = [asyncio.ensure_future(self._ask(peer, keep, timeout_s)) for peer in others]
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

    async def _ask(self, peer: str, keep: _Keep, timeout_s: float) -> bool:
        try:
            async with await self._node.open(peer, KEEP) as stream:
                await stream.send(keep.model_dump(mode="json"), timeout_s=ASK_S)
                answer = await stream.receive(timeout_s=timeout_s)
                return bool(answer.header.get("kept"))
        except RemoteError as error:
            _log.info("%s does not copy checkpoint %d: %s", short_id(peer), keep.version, error)
            return False

    async def _asked(self, stream: Stream) -> None:
        if stream.peer_id not in self._company():
            raise ProtocolError("a stranger asks us to keep a checkpoint", peer=stream.peer_id)
        try:
            keep = _Keep.model_validate((await stream.receive(timeout_s=ASK_S)).header)
        except ValueError as error:
            raise ProtocolError("not a request to keep a checkpoint", peer=stream.peer_id) from error
        kept = True
        try:
            await self.copy(record_of(keep.version, keep.blocks, keep.cluster), [stream.peer_id])
        except LocalError as error:
            _log.info("checkpoint %d of %s is not copied: %s", keep.version, short_id(stream.peer_id), error)
            kept = False
        await stream.send({"kept": kept}, timeout_s=ASK_S)

    async def copy(self, record: Record, sources: Iterable[str]) -> None:
        """Fetch a checkpoint's missing files from `sources`. Raises `RemoteError`, `LocalError` HP-DISK-*."""
        version = int(record["version"])
        async with self._begun(version, record):
            for block, digest in enumerate(record["blocks"]):
                if not self._store.has_kept(version, block, digest):
                    name = state_name(record.get("cluster", 0), version, block)
                    with self._store.incoming() as state:
                        await self._fetch(sources, name, self._limits[block], state)
                        await to_its_end(self._store.put, version, block, state, digest)
            others = [one for one in self._copied if one["blocks"] != record["blocks"]]
            self._copied = [*others, record][-KEPT:]

    async def _fetch(self, sources: Iterable[str], name: str, limit: int, into: IncomingState) -> None:
        """`name` from the first of `sources` that gives it. Raises the last `RemoteError`; HP-DISK-*."""
        last = RemoteError(
            "HP-SYNC-001",
            f"no peer could give {name}",
            why="no peer is known",
            fix="wait for another reliable peer to come back",
        )
        for peer in sources:
            try:
                await fetch_patiently(self._node, peer, name, limit, into)
            except RemoteError as error:
                last = error
            else:
                return
        raise last

    # ── those that count ────────────────────────────────────────────────────────────────────────────────────

    async def sealed(self, record: Record) -> None:
        """Note that a checkpoint here is sealed; older ones without room are deleted, now or with the next.

        Those of a later version belong to a history that was rolled back.
        """
        others = [one for one in self._sealed if one["blocks"] != record["blocks"]]
        if self._most > KEPT:
            others = [one for one in others if one["version"] <= record["version"]]
        self._sealed, self._newest = self._thinned([*others, record]), record
        self._copied = [one for one in self._copied if not _is_past(one, record)]
        if self._collected is not None and _is_past(self._collected, record):
            self._collected = None
        if not self._makers:
            async with self._alone():
                await self._prune()

    @asynccontextmanager
    async def state(self, cluster: int, version: int, block: int) -> AsyncIterator[Served | None]:
        """Context with the state of a block in a checkpoint here, or with None."""
        known = [self._initial, *self._sealed, *filter(None, [self._collected])]
        which = (cluster if version else 0, version)
        record = next((r for r in reversed(known) if (r.get("cluster", 0), r["version"]) == which), None)
        if record is None or not 0 <= block < len(self._limits) or not self._store.has(record, block):
            yield None
            return
        part = await asyncio.to_thread(self._store.open, record, block)
        yield Served(part, {"digest": record["blocks"][block]})


def _is_past(one: Record, sealed: Record) -> bool:
    """Whether `one` can no longer be sealed because `sealed` is."""
    clusters = one.get("cluster", 0), sealed.get("cluster", 0)
    return clusters[0] == clusters[1] and bool(one["version"] <= sealed["version"])
