"""A run's manifest and its latest amendment, from the peers that serve them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hetpeer.bootstrap.manifest import SignedManifest, read
from hetpeer.bootstrap.serving import fetch
from hetpeer.bootstrap.signing import AMENDMENT, MANIFEST
from hetpeer.dht.addresses import Address
from hetpeer.dht.errors import ExitCode, HetpeerError, LocalError, PeerLostError, RemoteError
from hetpeer.dht.node import Node
from hetpeer.dht.roster import Roster
from hetpeer.peer.arrival.known import MAX_PLACES, advertised_places

TRIES = 5
RETRY_S = 1.0
AMENDMENT_S = 8.0
MAX_ADVERTISED = 8
"""Peers that are asked because the DHT names them: anybody can put himself there."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A run's manifest, and the peer that gave it."""

    signed: SignedManifest
    peer: str


async def fetch_manifest(node: Node, addresses: Sequence[Address], run: str = "") -> Found:
    """The manifest of a run, from the first of `addresses` that gives a sound one, with the latest amendment that any of them knows.

    `run`: the id of the run that it must be; then those are asked as well that the DHT has for it.
    Raises `LocalError`: HP-RUN-001, HP-RUN-002, HP-RUN-003 (damaged), HP-RUN-016 (another run's) or HP-NET-006 (nobody serves one).
    """
    named = list(dict.fromkeys(address.peer_id for address in addresses))
    silent = ""
    for attempt in range(TRIES):
        refusals: list[HetpeerError] = []
        asked = named
        found = await _first(node, named, run, refusals)
        if found is None and run:
            others = [peer for peer in await _advertised(node, run) if peer not in named]
            asked = [*named, *others]
            found = await _first(node, others, run, refusals)
        if found is not None:
            return replace(found, signed=await amended(node, found.signed, asked))
        for refusal in refusals:
            if isinstance(refusal, LocalError):
                raise refusal
            silent = refusal.what
        if attempt < TRIES - 1:
            await asyncio.sleep(RETRY_S)
    raise LocalError(
        "HP-NET-006",
        f"no peer is found that serves run {run}" if run else "no peer at the given address serves a run",
        why=silent or "no address was given",
        fix="check the address with whoever gave it to you; to join through a rendezvous, use an invite",
        exit_code=ExitCode.NETWORK,
    )


async def _first(node: Node, peers: Iterable[str], run: str, refusals: list[HetpeerError]) -> Found | None:
    """From the first of `peers` that has it; `refusals` gets what was wrong with the others."""
    for peer in peers:
        try:
            data, _ = await fetch(node, peer, "manifest", MANIFEST.max_bytes)
            signed = read(bytes(data))
        except HetpeerError as error:
            refusals.append(error)
            continue
        if run in ("", signed.run_id):
            return Found(signed, peer)
        refusals.append(
            LocalError(
                "HP-RUN-016",
                f"{peer} serves another run than the one that is to be joined",
                why=f"it serves {signed.run_id} ({signed.manifest.name}), not {run}",
                fix="ask the run's author for a new invite",
                exit_code=ExitCode.VERSION,
            )
        )
    return None


async def _advertised(node: Node, run: str) -> list[str]:
    """Peers that say in the DHT that they are in `run`, and that we got through to: reliable ones first, as they say. Never raises."""
    try:
        adverts = await Roster(node, run).read()
    except RemoteError as error:
        _log.debug("who is in run %s: %s", run, error)
        return []
    others = [peer for peer in adverts if peer != node.peer_id]
    secrets.SystemRandom().shuffle(others)  # others ones each time, should strangers crowd in there
    others.sort(key=lambda peer: adverts[peer].role == "volunteer")
    others = others[:MAX_ADVERTISED]
    met = await asyncio.gather(*(_meet(node, advertised_places(peer, adverts[peer])) for peer in others))
    return [peer for peer, there in zip(others, met, strict=True) if there]


async def _meet(node: Node, places: Sequence[Address]) -> bool:
    for place in places[:MAX_PLACES]:
        try:
            await node.connect(place)
        except PeerLostError as error:
            _log.debug("%s: %s", place, error)
        else:
            return True
    return False


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
