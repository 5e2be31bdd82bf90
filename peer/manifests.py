"""A run's manifest and its latest amendment, from the peers that serve them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from hetpeer.bootstrap.manifest import SignedManifest, read
from hetpeer.bootstrap.serving import fetch
from hetpeer.bootstrap.signing import AMENDMENT, MANIFEST
from hetpeer.dht.addresses import Address
from hetpeer.dht.errors import ExitCode, LocalError, RemoteError
from hetpeer.dht.node import Node

TRIES = 5
RETRY_S = 1.0
AMENDMENT_S = 8.0

_log = logging.getLogger(__name__)


async def fetch_manifest(node: Node, addresses: Sequence[Address]) -> SignedManifest:
    """The manifest of the run, from the first of `addresses` that gives a sound one, with the latest amendment that any of them knows.

    Raises `LocalError`: HP-RUN-001, HP-RUN-002, HP-RUN-003 (damaged) or HP-NET-006 (nobody serves one).
    """
    silent: RemoteError | None = None
    for attempt in range(TRIES):
        unsound: LocalError | None = None
        for address in addresses:
            try:
                data, _ = await fetch(node, address.peer_id, "manifest", MANIFEST.max_bytes)
                return await amended(node, read(bytes(data)), (address.peer_id for address in addresses))
            except RemoteError as error:
                silent = error
            except LocalError as error:
                unsound = error
        if unsound is not None:
            raise unsound
        if attempt < TRIES - 1:
            await asyncio.sleep(RETRY_S)
    raise LocalError(
        "HP-NET-006",
        "no peer at the given address serves a run",
        why=silent.what if silent else "no address was given",
        fix="check the address with whoever gave it to you",
        exit_code=ExitCode.NETWORK,
    )


async def amended(node: Node, signed: SignedManifest, peers: Iterable[str]) -> SignedManifest:
    """`signed` with the latest amendment that any of `peers` knows. Never raises: who gives none, or a wrong one, does not count."""

    async def ask(peer: str) -> bytes:
        try:
            data, _ = await fetch(node, peer, "amendment", AMENDMENT.max_bytes, AMENDMENT_S)
        except RemoteError as error:
            _log.debug("no amendment from %s: %s", peer, error)
            return b""
        return bytes(data)

    for data in filter(None, await asyncio.gather(*map(ask, dict.fromkeys(peers)))):
        try:
            signed = signed.amended(data)
        except LocalError as error:
            _log.info("%s", error)
    return signed
