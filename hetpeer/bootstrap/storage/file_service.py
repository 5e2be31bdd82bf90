"""Named, hashed files and states from peer to peer: manifest, graphs, data shards, block states.

One request, one answer, on a stream of its own. Names: `manifest`, `amendment`, `file/<blake3>`, `state/<cluster>/<version>/<block>`. Every
peer serves what it has; who fetches checks the hash, so it does not matter from whom. Reliable peers serve `credit`, `credit/<peer id>` and `curves`, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

from blake3 import blake3

from hetpeer.bootstrap.storage.state_cache import StateCache
from hetpeer.dht.base.errors import PeerLostError, ProtocolError, RemoteError
from hetpeer.dht.node.node import Node
from hetpeer.dht.streams.stream import Stream

PROTOCOL: Final = "hetpeer/1/files"
REQUEST_TIMEOUT_S = 30.0
ASK_S = 8.0
"""A request is a few bytes: who takes longer to send it does so on purpose."""
SLOWEST = 8e3
"""Bytes/s at which an asker is to take what it asked for."""
ANSWER_TIMEOUT_S = 60.0
"""A holder may have to finish applying an update before it has the version asked for."""
FILE_TIMEOUT_S = 15.0
"""A file is there or not: who takes so long to say it is not waited for."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """One answer: `facts` go into the header, `data` is any bytes-like object."""

    data: Any
    facts: Mapping[str, Any]


class Shelf(Protocol):
    """Where a peer's files come from. The context keeps the data in place while it is being sent."""

    def find(self, name: str) -> AbstractAsyncContextManager[Served | None]: ...


class FileService:
    """The answering side; give `handle` to `Node.serve`."""

    def __init__(self, shelf: Shelf) -> None:
        self._lending = StateCache(shelf.find, lambda served: len(memoryview(served.data).cast("B")))

    async def handle(self, stream: Stream) -> None:
        request = (await stream.receive(timeout_s=ASK_S)).header
        name = request.get("want")
        if not isinstance(name, str) or len(name) > 200:
            raise ProtocolError("a request without a name", peer=stream.peer_id)
        async with self._lending.lend(name, stream.abort) if _is_plain(name) else nullcontext() as served:
            if served is None:
                await stream.send({"missing": name}, timeout_s=REQUEST_TIMEOUT_S)
            else:
                patience = REQUEST_TIMEOUT_S + len(memoryview(served.data).cast("B")) / SLOWEST
                await stream.send({"facts": dict(served.facts)}, served.data, timeout_s=patience)
            # The asker closes; until then the answer may still be under way.
            try:
                await stream.receive(timeout_s=REQUEST_TIMEOUT_S)
            except PeerLostError:
                _log.debug("%s has taken %s", stream.peer_id, name)


def _is_plain(name: str) -> bool:
    """Whether its numbers are written as we write them: a thing has one name."""
    return all(not part.isdecimal() or part == str(int(part)) for part in name.split("/"))


async def fetch(
    node: Node, peer_id: str, name: str, limit: int, answer_s: float = ANSWER_TIMEOUT_S
) -> tuple[bytearray, Mapping[str, Any]]:
    """`name` from `peer_id`: its bytes, at most `limit`, and the facts about it. Raises `RemoteError`."""
    stream = await node.open(peer_id, PROTOCOL)
    async with stream:
        await stream.send({"want": name}, timeout_s=REQUEST_TIMEOUT_S)
        frame = await stream.receive(payload_limit=limit, timeout_s=answer_s)
        if "missing" in frame.header:
            raise RemoteError(
                "HP-SYNC-002",
                f"peer {peer_id} does not have {name}",
                peer=peer_id,
                why="it takes part in another run, has not fetched it yet, has dropped it, or gives as much to others as it can",
                fix="nothing: others are asked, and this one again",
            )
        facts = frame.header.get("facts")
        data = await stream.receive_bytes(limit)
        return data, facts if isinstance(facts, dict) else {}


def state_name(cluster: int, version: int, block: int) -> str:
    """Under which a block's state is asked for; of the initial one any cluster will do."""
    return f"state/{cluster}/{version}/{block}"


async def fetch_file(node: Node, peers: Iterable[str], digest: str, size: int) -> bytearray:
    """The file with this blake3 from the first of `peers` that has it undamaged.

    Raises `RemoteError` HP-SYNC-001 naming what went wrong at the last one, which is its cause.
    """
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
