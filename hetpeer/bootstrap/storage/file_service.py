"""Named, hashed files and states from peer to peer: manifest, graphs, data shards, block states.

One request and one answer per stream. Names: `manifest`, `amendment`, `file/<blake3>`,
`state/<cluster>/<version>/<block>`. Every peer serves what it has from its disk; the receiver checks the
hash, so the source does not matter. Reliable peers also serve `credit`, `credit/<peer id>` and `curves`.

There is one copy of each state that is being sent (`StateCache`), however many peers take it, within a memory
limit. A slow receiver occupies a copy. When memory is short, a request for another state evicts older
versions of the same state, and copies in use for longer than a link of 2 Mbit/s needs (docs/links.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Generic, Protocol, TypeVar

from blake3 import blake3

from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import PeerLostError, ProtocolError, RemoteError
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

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """One answer: `facts` go into the header, `data` is any bytes-like object."""

    data: Any
    facts: Mapping[str, Any]


class Shelf(Protocol):
    """Source of served data. The context keeps the data in place while it is sent."""

    def find(self, name: str) -> AbstractAsyncContextManager[Served | None]:
        """Context with the data called `name`, or None if there is none."""


class FileService:
    """Answering side; pass `handle` to `Node.serve`."""

    def __init__(self, shelf: Shelf) -> None:
        self._lending = StateCache(shelf.find, lambda served: len(memoryview(served.data).cast("B")))

    async def handle(self, stream: Stream) -> None:
        """Answer one request. Raises `ProtocolError` if malformed, `RemoteError` if the peer is lost."""
        request = (await stream.receive(timeout_s=ASK_S)).header
        name = request.get("want")
        if not isinstance(name, str) or len(name) > 200:
            raise ProtocolError("a request without a name", peer=stream.peer_id)
        async with self._lending.lend(name, stream.abort) if _is_plain(name) else nullcontext() as served:
            if served is None:
                await stream.send({"missing": name}, timeout_s=REQUEST_TIMEOUT_S)
            else:
                timeout_s = REQUEST_TIMEOUT_S + len(memoryview(served.data).cast("B")) / SLOWEST
                await stream.send({"facts": dict(served.facts)}, served.data, timeout_s=timeout_s)
            # The asker closes; until then the answer may still be under way.
            try:
                await stream.receive(timeout_s=REQUEST_TIMEOUT_S)
            except PeerLostError:
                _log.debug("%s has taken %s", stream.peer_id, name)


def _is_plain(name: str) -> bool:
    """Whether the numbers in `name` are in canonical form, so that each thing has one name."""
    return all(not part.isdecimal() or part == str(int(part)) for part in name.split("/"))


async def fetch(
    node: Node, peer_id: str, name: str, limit: int, answer_s: float = ANSWER_TIMEOUT_S
) -> tuple[bytearray, Mapping[str, Any]]:
    """Fetch `name` from `peer_id`: at most `limit` bytes, and the facts about it. Raises `RemoteError`."""
    stream = await node.open(peer_id, PROTOCOL)
    async with stream:
        await stream.send({"want": name}, timeout_s=REQUEST_TIMEOUT_S)
        frame = await stream.receive(payload_limit=limit, timeout_s=answer_s)
        if "missing" in frame.header:
            raise RemoteError(
                "HP-SYNC-002",
                f"peer {peer_id} does not have {name}",
                peer=peer_id,
                why="it takes part in another run, has not fetched it yet, has dropped it, or gives as much "
                "to others as it can",
                fix="nothing: others are asked, and this one again",
            )
        facts = frame.header.get("facts")
        data = await stream.receive_bytes(limit)
        return data, facts if isinstance(facts, dict) else {}


def state_name(cluster: int, version: int, block: int) -> str:
    """Name of a block's state; for the initial state (version 0) any cluster is valid."""
    return f"state/{cluster}/{version}/{block}"


async def fetch_file(node: Node, peers: Iterable[str], digest: str, size: int) -> bytearray:
    """Fetch the file with this blake3 from the first peer that has it. Raises `RemoteError` HP-SYNC-001."""
    last: RemoteError | None = None
    for peer_id in peers:
        try:
            data, _ = await fetch(node, peer_id, f"file/{digest}", size, FILE_TIMEOUT_S)
        except RemoteError as error:
            last = error
            continue
        if await asyncio.to_thread(_digest, data) == digest:
            return data
        last = RemoteError(
            "HP-SYNC-003",
            f"peer {peer_id} sent a damaged file",
            peer=peer_id,
            why="its content does not have the hash the manifest says",
            fix="nothing: others are asked",
        )
    raise RemoteError(
        "HP-SYNC-001",
        f"no peer could give the file {digest[:12]} of the run",
        why=last.what if last else "no peer is known",
        fix="wait for the bootstrap node to come back, or ask the run's author",
    ) from last


def _digest(data: bytearray) -> str:
    return blake3(data).hexdigest()


StateSource = Callable[[int, int, int], Awaitable[Served | None]]
"""(cluster, version, block) → the block's state file, or None if it is not here."""
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
                yield Served(self._run.signed.data, {})
            case ["amendment"] if self._membership_config.data:
                yield Served(self._membership_config.data, {})
            case ["file", digest] if digest in self._files and self._files[digest].is_file():
                yield Served(await asyncio.to_thread(self._files[digest].read_bytes), {})
            case ["state", *numbers] if len(numbers) == 3 and all(map(str.isdecimal, numbers)):
                cluster, version, block = map(int, numbers)
                yield await self._states(cluster, version, block)
            case [kind, *about] if kind in self._answers and len(about) < 2:
                yield Served(self._answers[kind]("".join(about)), {})
            case _:
                yield None


# ── copies of states ────────────────────────────────────────────────────────────────────────────────────────


MOST_COPIED = 1 << 28
"""Limit in bytes of all copies; raised to OF_THE_LARGEST times the largest copy."""
OF_THE_LARGEST = 4
UNSEEN = 1 << 23
"""Assumed size in bytes of a copy in the making, if no larger one was seen."""
FRESH_S = 20.0
"""Seconds for which a copy is lent to further peers; later its name may stand for other data."""
AT_LEAST_S, SLOW = 30.0, 250e3
"""Seconds, and bytes/s: a transfer slower than both together may be cut when memory is short."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Copy(Generic[T]):
    name: str
    made_at: float
    lent_at: float
    data: asyncio.Future[T | None]
    nbytes: int = 0
    borrowers: dict[object, Callable[[], None]] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    making: asyncio.Task[None] | None = None

    def overdue_s(self, now: float) -> float:
        """Seconds by which the latest transfer exceeds its allowed duration; negative: not exceeded."""
        return now - self.lent_at - AT_LEAST_S - self.nbytes / SLOW


class StateCache(Generic[T]):
    """Cache of `find`'s results, which keeps data in place while its context is open; `size` gives bytes."""

    def __init__(
        self, find: Callable[[str], AbstractAsyncContextManager[T | None]], size: Callable[[T], int]
    ) -> None:
        self._find = find
        self._size = size
        self._copies: list[_Copy[T]] = []
        self._largest = UNSEEN

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.nbytes or self._largest for copy in self._copies)

    @asynccontextmanager
    async def lend(self, name: str, cut: Callable[[], None]) -> AsyncIterator[T | None]:
        """Context with the data for `name`, or None if there is none or no room. Raises what `find` raises.

        `cut` is called when the transfer must end to make room.
        """
        copy = self._copy(name, asyncio.get_running_loop().time())
        if copy is None:
            yield None
            return
        borrower = object()
        copy.borrowers[borrower] = cut
        try:
            yield await asyncio.shield(copy.data)
        finally:
            del copy.borrowers[borrower]
            if not copy.borrowers:
                self._drop(copy)
                if copy.making is not None and not copy.data.done():
                    copy.making.cancel()

    def _copy(self, name: str, now: float) -> _Copy[T] | None:
        """A copy of `name`: a fresh one, or one that is being made; None if there is no room."""
        fresh = (one for one in self._copies if one.name == name and now - one.made_at <= FRESH_S)
        if copy := next(fresh, None):
            copy.lent_at = now
            return copy
        if not self._makes_room(name, now):
            return None
        copy = _Copy(name, now, now, asyncio.get_running_loop().create_future())
        self._copies.append(copy)
        copy.making = asyncio.ensure_future(self._make(copy))
        return copy

    def _makes_room(self, name: str, now: float) -> bool:
        """Evict overdue copies. Returns whether `name` has room, or will have it without older versions."""
        while self.nbytes >= self._most:
            slowest = max(self._copies, key=lambda one: one.overdue_s(now))
            if slowest.overdue_s(now) <= 0:
                return any(_is_older(one.name, name) for one in self._copies)
            self._drop(slowest)
        return True

    @property
    def _most(self) -> int:
        return max(MOST_COPIED, OF_THE_LARGEST * self._largest)

    def _made(self, copy: _Copy[T], data: T) -> None:
        copy.nbytes = self._size(data)
        self._largest = max(self._largest, copy.nbytes)
        older = sorted(
            (one for one in self._copies if _is_older(one.name, copy.name)), key=lambda one: one.made_at
        )
        for one in older:
            if self.nbytes - copy.nbytes >= self._most:
                self._drop(one)

    def _drop(self, copy: _Copy[T]) -> None:
        if copy in self._copies:
            self._copies.remove(copy)
            for cut in list(copy.borrowers.values()):
                cut()
        copy.over.set()

    async def _make(self, copy: _Copy[T]) -> None:
        """Make `copy`, and keep its data in place until the copy is over."""
        try:
            async with self._find(copy.name) as data:
                if data is not None:
                    self._made(copy, data)
                elif copy in self._copies:
                    self._copies.remove(copy)  # the next request may find it
                copy.data.set_result(data)
                await copy.over.wait()
        except Exception as error:
            if copy.data.done():
                raise
            copy.data.set_exception(error)
            copy.data.exception()  # retrieved, since the asker may be gone


def _is_older(name: str, than: str) -> bool:
    """Whether `name` is an earlier version than `than` of the same block's state."""
    one, other = name.split("/"), than.split("/")
    if not one[0] == other[0] == "state" or not len(one) == len(other) == 4:
        return False
    if not all(map(str.isdecimal, (one[2], other[2]))):
        return False
    return (one[1], one[3]) == (other[1], other[3]) and int(one[2]) < int(other[2])
