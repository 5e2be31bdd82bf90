"""Named, hashed files and states from peer to peer: manifest, graphs, data shards, block states.

One request and one answer per stream. Names: `manifest`, `amendment`, `file/<blake3>`,
`state/<cluster>/<version>/<block>`. Every peer serves what it has from its disk; the receiver checks the
hash, so the source does not matter. Reliable peers also serve `credit`, `credit/<peer id>` and `curves`.

Files and states are sent and received piece by piece, and are in no peer's memory. What is given to others
at a time has a limit (state_cache.py). Without room the answer is `busy` besides `missing`: the asker comes
again by its own clock. Versions before 5 read only `missing`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from blake3 import blake3

from hetpeer.bootstrap.run.durable_files import GrowingFile
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.state_cache import Borrower, NoRoomError, StateCache
from hetpeer.dht.base.errors import PeerLostError, ProtocolError, RemoteError
from hetpeer.dht.base.file_pieces import FilePart, InMemory, Readable
from hetpeer.dht.base.runtime import to_its_end
from hetpeer.dht.node.node import Node
from hetpeer.dht.streams.stream import Stream

PROTOCOL: Final = "hetpeer/1/files"
REQUEST_TIMEOUT_S = 30.0
ASK_S = 8.0
"""Seconds to send a request, which is a few bytes."""
SLOWEST = 8e3
"""Lowest rate in bytes/s at which a peer may take an answer."""
ANSWER_TIMEOUT_S = 60.0
"""Seconds until an answer begins: a holder may have to finish applying an update first."""
FILE_TIMEOUT_S = 15.0
"""Seconds until an answer about a file begins."""
MUCH, FIND_S = 1 << 24, 10.0
"""A file or state that may have so many bytes or more is fetched past libp2p if a way is found within so many
seconds: for half the processor time.
"""
BUSY_RETRY_S, BUSY_S = 2.0, 120.0
"""Seconds until a busy peer is asked again, and for which it is asked again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """One answer: `facts` go into the header, `data` is sent piece by piece."""

    data: Readable
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, data: bytes) -> Served:
        """An answer of bytes in memory, without facts."""
        return cls(InMemory(data), {})


class Shelf(Protocol):
    """Source of served data. The context keeps the data in place while it is sent."""

    def find(self, name: str) -> AbstractAsyncContextManager[Served | None]:
        """Context with the data called `name`, or None if there is none."""


class FileService:
    """Answering side; pass `handle` to `Node.serve`."""

    def __init__(self, shelf: Shelf, is_known: Callable[[str], bool] = lambda _peer: False) -> None:
        """`is_known`: whether a peer is a reliable peer, or has a place in the run."""
        self._lending = StateCache(shelf.find, lambda served: served.data.nbytes)
        self._is_known = is_known

    async def handle(self, stream: Stream) -> None:
        """Answer one request. Raises `ProtocolError` if malformed, `RemoteError` if the peer is lost."""
        request = (await stream.receive(timeout_s=ASK_S)).header
        name = request.get("want")
        if not isinstance(name, str) or len(name) > 200:
            raise ProtocolError("a request without a name", peer=stream.peer_id)
        borrower = Borrower(stream.abort, lambda: stream.delivered, self._is_known(stream.peer_id))
        try:
            async with self._lending.lend(name, borrower) if _is_plain(name) else nullcontext() as served:
                if served is None:
                    await stream.send({"missing": name}, timeout_s=REQUEST_TIMEOUT_S)
                else:
                    timeout_s = REQUEST_TIMEOUT_S + served.data.nbytes / SLOWEST
                    await stream.send_file({"facts": dict(served.facts)}, served.data, timeout_s=timeout_s)
                await _until_taken(stream, name)
        except NoRoomError:
            await stream.send({"missing": name, "busy": True}, timeout_s=REQUEST_TIMEOUT_S)
            await _until_taken(stream, name)
        except OSError as error:  # the stream is broken: nobody takes half of it for the whole
            _log.warning("%s cannot be given: %s", name, error.strerror or error)


async def _until_taken(stream: Stream, name: str) -> None:
    """Return when the asker has closed `stream`: until then the answer may still be under way."""
    try:
        await stream.receive(timeout_s=REQUEST_TIMEOUT_S)
    except PeerLostError:
        _log.debug("%s has taken %s", stream.peer_id, name)


def _is_plain(name: str) -> bool:
    """Whether the numbers in `name` are in canonical form, so that each thing has one name."""
    return all(not part.isdecimal() or part == str(int(part)) for part in name.split("/"))


class BusyError(RemoteError):
    """HP-SYNC-005: a peer has what is asked for, or may have it, and no room to give it now."""

    def __init__(self, peer: str, name: str) -> None:
        super().__init__(
            "HP-SYNC-005",
            f"peer {peer} has no room to give {name} now",
            peer=peer,
            why="it gives as much to others as it can",
            fix="nothing: it is asked again in a few seconds",
        )


class Target(Protocol):
    """A place for what is fetched."""

    def begin(self, nbytes: int) -> None:
        """Make room for `nbytes` bytes, in place of what was there. Raises `LocalError`, as `write` does."""

    def write(self, begin: int, data: Any) -> None:
        """Write the buffer `data` from byte `begin` on. Called in a thread, one call after the other."""


async def fetch_patiently(node: Node, peer_id: str, name: str, limit: int, into: Target) -> Mapping[str, Any]:
    """`fetch_into`; ask a busy peer again every BUSY_RETRY_S, for BUSY_S at most."""
    end = asyncio.get_running_loop().time() + BUSY_S
    while True:
        try:
            return await fetch_into(node, peer_id, name, limit, into)
        except BusyError:
            if asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(BUSY_RETRY_S)


async def fetch(
    node: Node, peer_id: str, name: str, limit: int, answer_s: float = ANSWER_TIMEOUT_S
) -> tuple[bytearray, Mapping[str, Any]]:
    """Fetch `name`, which is small, from `peer_id`: at most `limit` bytes, and the facts about it.

    Raises `RemoteError`, `BusyError` if the peer has no room to give it now.
    """
    async with _asked(node, peer_id, name, limit, answer_s) as (stream, _, facts):
        return await stream.receive_bytes(limit), facts


async def fetch_into(
    node: Node, peer_id: str, name: str, limit: int, into: Target, answer_s: float = ANSWER_TIMEOUT_S
) -> Mapping[str, Any]:
    """Fetch `name` from `peer_id` into a file, piece by piece; returns the facts about it.

    Raises as `fetch`, and what `into` raises.
    """
    async with _asked(node, peer_id, name, limit, answer_s, much=limit >= MUCH) as (stream, nbytes, facts):
        into.begin(nbytes)
        await stream.receive_pieces(lambda begin, piece: to_its_end(into.write, begin, piece))
        return facts


@asynccontextmanager
async def _asked(
    node: Node, peer_id: str, name: str, limit: int, answer_s: float, *, much: bool = False
) -> AsyncIterator[tuple[Stream, int, Mapping[str, Any]]]:
    """Ask for `name`; the stream with the answer's payload, its length, and the facts. Raises as `fetch`."""
    direct = await node.open_directly(peer_id, PROTOCOL, timeout_s=FIND_S) if much else None
    async with direct or await node.open(peer_id, PROTOCOL) as stream:
        await stream.send({"want": name}, timeout_s=REQUEST_TIMEOUT_S)
        frame = await stream.receive(payload_limit=limit, timeout_s=answer_s)
        if frame.header.get("busy") is True:
            raise BusyError(peer_id, name)
        if "missing" in frame.header:
            raise RemoteError(
                "HP-SYNC-002",
                f"peer {peer_id} does not have {name}",
                peer=peer_id,
                why="it takes part in another run, has not fetched it yet, or has dropped it",
                fix="nothing: others are asked, and this one again",
            )
        facts = frame.header.get("facts")
        yield stream, frame.payload_length, facts if isinstance(facts, dict) else {}


def state_name(cluster: int, version: int, block: int) -> str:
    """Name of a block's state; for the initial state (version 0) any cluster is valid."""
    return f"state/{cluster}/{version}/{block}"


class _Hashed:
    """A `Target` in the file `file`, and the hash of what is written."""

    def __init__(self, file: GrowingFile) -> None:
        self._file = file
        self._hasher = blake3()

    def begin(self, nbytes: int) -> None:
        self._file.begin(nbytes)
        self._hasher = blake3()

    def write(self, begin: int, data: Any) -> None:
        self._hasher.update(data)  # the pieces come in order
        self._file.write(begin, data)

    def digest(self) -> str:
        return self._hasher.hexdigest()


async def fetch_file(node: Node, peers: Iterable[str], path: Path, digest: str, size: int) -> None:
    """Fetch the file with this blake3 to `path` from the first peer that has it.

    While some peers are busy, all are asked again. Raises `RemoteError` HP-SYNC-001, `LocalError` HP-DISK-001
    or HP-DISK-002; `path` is as it was then.
    """
    known, end = list(peers), asyncio.get_running_loop().time() + BUSY_S
    while True:
        try:
            await _fetch_file_once(node, known, path, digest, size)
        except _AllBusyError as busy:
            if asyncio.get_running_loop().time() > end:
                raise busy.error from busy
        else:
            return
        await asyncio.sleep(BUSY_RETRY_S)


class _AllBusyError(Exception):
    """No peer gave a file, and one of them was only busy; `error` says so to people."""

    def __init__(self, error: RemoteError) -> None:
        super().__init__()
        self.error = error


async def _fetch_file_once(node: Node, peers: Sequence[str], path: Path, digest: str, size: int) -> None:
    last: RemoteError | None = None
    busy = False
    for peer_id in peers:
        with GrowingFile(path) as file:
            into = _Hashed(file)
            try:
                await fetch_into(node, peer_id, f"file/{digest}", size, into, FILE_TIMEOUT_S)
            except RemoteError as error:
                last, busy = error, busy or isinstance(error, BusyError)
                continue
            if into.digest() == digest:
                await to_its_end(file.keep, path)
                return
        last = RemoteError(
            "HP-SYNC-003",
            f"peer {peer_id} sent a damaged file",
            peer=peer_id,
            why="its content does not have the hash the manifest says",
            fix="nothing: others are asked",
        )
    none = RemoteError(
        "HP-SYNC-001",
        f"no peer could give the file {digest[:12]} of the run",
        why=last.what if last else "no peer is known",
        fix="wait for the bootstrap node to come back, or ask the run's author",
    )
    raise (_AllBusyError(none) if busy else none) from last


StateSource = Callable[[int, int, int], AbstractAsyncContextManager[Served | None]]
"""(cluster, version, block) → context with the block's state file, or with None if it is not here."""
Answer = Callable[[str], bytes]
"""Part of a name after its slash (or nothing) → answer. Raises `ProtocolError` for an invalid name."""


class ServedRunFiles:
    """Server of `run`'s manifest, amendment, files, `states`, and of `answers` (by name) from the log."""

    def __init__(
        self,
        run: RunDirectory,
        membership_config: MembershipConfig,
        states: StateSource,
        answers: Mapping[str, Answer] = MappingProxyType({}),
    ) -> None:
        self._run = run
        self._membership_config = membership_config
        self._states = states
        self._answers = answers
        self._files = {reference.blake3: path for reference, path in run.files()}

    @asynccontextmanager
    async def find(self, name: str) -> AsyncIterator[Served | None]:
        """Data for `name`, or None if it is unknown or not here."""
        match name.split("/"):
            case ["manifest"]:
                yield Served.of(self._run.signed.data)
            case ["amendment"] if self._membership_config.data:
                yield Served.of(self._membership_config.data)
            case ["file", digest] if digest in self._files and self._files[digest].is_file():
                yield Served(FilePart.whole(self._files[digest]), {})
            case ["state", *numbers] if len(numbers) == 3 and all(map(str.isdecimal, numbers)):
                cluster, version, block = map(int, numbers)
                async with self._states(cluster, version, block) as served:
                    yield served
            case [kind, *about] if kind in self._answers and len(about) < 2:
                yield Served.of(self._answers[kind]("".join(about)))
            case _:
                yield None
