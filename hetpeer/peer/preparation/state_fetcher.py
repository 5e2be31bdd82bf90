"""Preparation of a place: its graphs and buffers, shards of data, and the states of its blocks.

Files come from any peer that has them, and are checked against the manifest's hashes. States come from
holders or from the coordinator's checkpoint, and are checked by their digests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from hetpeer.averaging.effects import FetchState
from hetpeer.averaging.messages import TermView
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.bootstrap.run.durable_files import safe_join
from hetpeer.bootstrap.run.manifest_files import FileRef
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory, check_file
from hetpeer.bootstrap.storage.file_service import fetch_file, fetch_into, state_name
from hetpeer.dht.base.errors import ExitCode, LocalError, ProtocolError, RemoteError, short_id
from hetpeer.dht.base.file_pieces import FilePart
from hetpeer.dht.base.runtime import going_on, to_its_end
from hetpeer.dht.node.node import Node
from hetpeer.peer.arrival.manifest_fetch import amended
from hetpeer.peer.preparation.disk_room import Room
from hetpeer.peer.transport.exchange import PassingState, StateRoomError
from hetpeer.stages.block.block_state import layout_of
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.block.state_file import file_bytes
from hetpeer.stages.block.tensor_file import StoredTensor, read_constants
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.graph.block_wire import read_block
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc.arena import Arena, ArenaFullError, BundleLayout, Extent
from hetpeer.stages.ipc.compute import Compute
from hetpeer.stages.ipc.worker_messages import BlockPrepared, CommandFailedError, Loaded

RETRY_S = 0.3
PREPARE_RETRY_S = 2.0
HOPELESS = ("HP-GPU-001", "HP-MEM-", "HP-DISK-007", "HP-DISK-008")
"""Codes of what no other copy of a state mends: there is no worker, or no memory or disk for it."""
ASKED_FIRST = 2
"""Volunteers that are asked for a shard before a reliable peer is, to share the work of serving data."""

T = TypeVar("T")

_log = logging.getLogger(__name__)
AT_ONCE = 4
"""Files fetched at a time: tensors need some of a peer's eight streams to another (dht/p2pd/listener.py)."""


@dataclass(eq=False)
class RunFiles:
    """The files of a run on this volunteer's disk.

    A missing file is fetched from the peers `named`, then from reliable ones, then from others that were met,
    into what `room` there is.
    """

    _node: Node
    run: RunDirectory
    membership_config: MembershipConfig
    _named: Sequence[str]
    room: Room
    volunteers: tuple[str, ...] = ()
    """Volunteers that take part, and may have shards of the data."""
    _met: dict[str, None] = field(default_factory=dict)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    @property
    def peers(self) -> list[str]:
        """Peers to ask, in that order."""
        return list(dict.fromkeys((*self._named, *self.membership_config.peers, *self._met)))

    def meet(self, peers: Iterable[str]) -> None:
        """Add peers that may have files."""
        self._met |= dict.fromkeys(peers)

    async def look_for_amendment(self) -> None:
        """Ask all known peers whether the reliable peers have changed. Raises `LocalError` HP-DISK-*."""
        others = [peer for peer in (*self.peers, *self.volunteers) if peer != self._node.peer_id]
        signed = await amended(self._node, self.run.signed, others)
        if signed.amendment is not None:
            self.membership_config.learn(signed.amendment.data)

    async def need(self, folder: Path, reference: FileRef) -> Path:
        """The file, fetched if missing or damaged. Raises `RemoteError` HP-SYNC-001, LocalError HP-DISK-*."""
        path = folder / reference.name
        try:
            await asyncio.to_thread(check_file, reference, path)
        except LocalError:
            await self._fetch(folder, reference, self.peers)
        return path

    async def fetch_shard(self, shard: FileRef) -> None:
        """Fetch a shard of the data from any holder. Raises as `need`."""
        others = [peer for peer in self.volunteers if peer != self._node.peer_id]
        others.sort(key=lambda peer: hash((peer, shard.name)))  # everybody begins somewhere else
        peers = dict.fromkeys((*others[:ASKED_FIRST], *self.peers, *others))
        await self._fetch(self.run.data, shard, peers)

    async def _fetch(self, folder: Path, reference: FileRef, peers: Iterable[str]) -> None:
        async with self._turns, self.room.for_file(reference.bytes):
            path = safe_join(folder, reference.name)
            await fetch_file(self._node, peers, path, reference.blake3, reference.bytes)

    async def graph(self, block: int) -> bytes:
        """The graph of `block`, fetched if need be. Raises as `need`."""
        entry = self.run.manifest.blocks[block]
        path = await self.need(self.run.path / "graph", entry.graph)
        return await asyncio.to_thread(path.read_bytes)

    async def buffers(self, block: int) -> Path | None:
        """The safetensors file of the block's constants, if it has any, fetched if need be."""
        reference = self.run.manifest.blocks[block].buffers
        if reference is None:
            return None
        return await self.need(self.run.path / "state", reference)


class OwnCopies(Protocol):
    """Copies of states of the last checkpoint on this volunteer's disk."""

    def own(self, version: int, block: int, digest: str) -> tuple[PassingState, Extent] | None:
        """The copy of just that state, with one more user, and its place; None if there is none."""

    def keep(self, line: TermView, version: int, block: int, digest: str, state: PassingState) -> None:
        """Keep a state of a checkpoint that was fetched."""

    def give_way(self) -> bool:
        """Drop copies that nobody waits for; whether there were any."""


class StateFetcher:
    """Loads the agreed state of blocks into the worker: from our own `copies` if they are that state."""

    def __init__(
        self, node: Node, compute: Compute, reliable: Sequence[str], kept: int, copies: OwnCopies
    ) -> None:
        """The run's optimizer keeps `kept` vectors of each block."""
        self._copies = copies
        self._node = node
        self._compute = compute
        self._reliable = reliable
        self._vectors = 1 + kept
        self._said = False
        """Whether it was said that the disk has no room."""

    async def load(
        self,
        order: FetchState,
        specs: Sequence[BlockSpec],
    ) -> dict[int, str]:
        """Load the version that `order` names of every block of `specs`, which say whether it is recomputed
        here; returns the digests of what was loaded.

        Tries the holders, then the reliable peers' checkpoints, again and again: cancel it when the version
        is no longer wanted. Raises `WorkerDiedError`, `LocalError` HP-MEM-* if there is no memory for it, and
        `StateRoomError` if `limits.disk` is too small: another try would not help.
        """
        return {spec.index: await self._load_block(order, spec) for spec in specs}

    async def _load_block(self, order: FetchState, spec: BlockSpec) -> str:
        """Load one state until it is the agreed one: our copy, or what holders or reliable peers give."""
        version, digest = order.version, order.digests.get(spec.index)
        if digest is not None and await self._load_own(spec, version, digest):
            return digest
        holders = [p for p in order.sources.get(spec.index, ()) if p != self._node.peer_id]
        theirs = state_name(order.line.cluster, version, spec.index)
        stored = state_name(order.origin, version, spec.index)
        places = [*((peer, theirs) for peer in holders), *((peer, stored) for peer in self._reliable)]
        limit = file_bytes(layout_of(spec), self._vectors)
        while True:
            for peer, name in places:
                state = PassingState(self._compute.exchange)
                try:
                    await fetch_into(self._node, peer, name, limit, state)
                    loaded = await self._load_into_worker(spec, state, state.extent)
                    if loaded.version == version and digest in (None, loaded.digest):
                        if digest is not None and peer in self._reliable:
                            self._copies.keep(order.line, version, spec.index, loaded.digest, state)
                        return loaded.digest
                except (RemoteError, LocalError) as error:
                    if isinstance(error, LocalError) and error.code.startswith(HOPELESS):
                        raise
                    await self._wait_for_room(error)
                    _log.debug("state of block %d from %s: %s", spec.index, short_id(peer), error)
                    continue
                finally:
                    state.drop()
                _log.warning(
                    "peer %s sent a state of block %d that is not the agreed one", short_id(peer), spec.index
                )
            await asyncio.sleep(RETRY_S)

    async def _load_own(self, spec: BlockSpec, version: int, digest: str) -> bool:
        """Load our own copy of the state; whether there is one, and it is that state."""
        if (found := self._copies.own(version, spec.index, digest)) is None:
            return False
        state, place = found
        try:
            loaded = await self._load_into_worker(spec, state, place)
        except LocalError as error:
            if error.code.startswith(HOPELESS):
                raise
            _log.warning("our copy of block %d's state is damaged: %s", spec.index, error)
            return False
        finally:
            state.drop()
        return (loaded.version, loaded.digest) == (version, digest)

    async def _wait_for_room(self, error: RemoteError | LocalError) -> None:
        """If there was no room for a state, say so once and wait. Raises `error` if there will be none."""
        if isinstance(error, StateRoomError) and not self._copies.give_way():
            if not error.ever:
                raise error
            if not self._said:
                self._said = True
                _log.warning("%s; it is tried again", error)
            await asyncio.sleep(PREPARE_RETRY_S)

    async def _load_into_worker(self, spec: BlockSpec, state: PassingState, place: Extent) -> Loaded:
        """Load the state file at `place`, which is that of `state`, into the worker."""
        state.use()

        async def load() -> Loaded:
            try:
                return await self._compute.submit(
                    c.LoadState(block=spec.index, state=place, recompute=spec.recompute)
                )
            finally:
                state.drop()

        # The version may be unwanted by now; the worker reads all the same, and the place stays until then.
        return await going_on(load())


async def prepare_block(
    compute: Compute, files: RunFiles, block: int, offload: Offload, *, spills: bool
) -> tuple[BlockSpec, int]:
    """Load a block's graph and constants into the worker; returns its spec and the room its state needs to be
    dumped.

    Raises `RemoteError` HP-SYNC-001, `LocalError` HP-RUN-025, `WorkerDiedError`.
    """
    manifest = files.run.manifest
    training = manifest.training
    graph = await files.graph(block)
    with _judged(block):
        spec = await asyncio.to_thread(read_block, graph)
    groups = tuple((group.pattern, group.changes) for group in training.groups)
    layout = BundleLayout.of(spec.buffer_specs)
    constants = await _constants(files, spec)
    whole = await _room(compute.arena, layout.nbytes)
    extents = layout.within(whole)
    try:
        for name, stored in constants.items():
            await to_its_end(stored.read_into, 0, compute.arena.view(extents[name]))
        with _judged(block):
            prepared: BlockPrepared = await compute.submit(
                c.PrepareBlock(
                    block=block,
                    graph=graph,
                    buffers=extents,
                    update=training.update,
                    groups=groups,
                    keeps=manifest.optimizer_state,
                    outer=manifest.outer_rule,
                    ranges=Ties(manifest.ties).parts(block, spec.parameter_count),
                    offload=offload,
                    spills=spills,
                    cast=training.keeps_cast,
                )
            )
    finally:
        compute.arena.release(whole)
        compute.arena.trim()
    return spec, prepared.dump_bytes


async def _room(arena: Arena, nbytes: int) -> Extent:
    """Room in the arena, once ending steps have freed it. Raises ArenaFullError if all is too little."""
    while True:
        try:
            return arena.allocate(nbytes)
        except ArenaFullError as error:
            if nbytes > arena.capacity:
                raise
            _log.info("a block waits: %s", error)
        await asyncio.sleep(RETRY_S)


@contextlib.contextmanager
def _judged(block: int) -> Iterator[None]:
    """Turn the refusal of a graph into `LocalError` HP-RUN-025: every copy with that hash is equal."""
    try:
        yield
    except (ProtocolError, CommandFailedError) as error:
        if error.code != "HP-WIRE-001":
            raise
        raise LocalError(
            "HP-RUN-025",
            f"the graph of block {block} of this run is refused",
            why=error.what,
            fix="update hetpeer; where it is the newest, tell the run's author",
            exit_code=ExitCode.VERSION,
        ) from error


async def _constants(files: RunFiles, spec: BlockSpec) -> dict[str, StoredTensor]:
    """The block's constant tensors, where they lie in their file."""
    path = await files.buffers(spec.index)
    return {} if path is None else read_constants(FilePart.whole(path), spec.buffer_specs)


async def keep_trying(get: Callable[[], Awaitable[T]]) -> T:
    """The result of `get`, tried again until a peer of the run can give it."""
    while True:
        try:
            return await get()
        except RemoteError as error:
            _log.warning("%s; trying again", error)
            await asyncio.sleep(PREPARE_RETRY_S)
