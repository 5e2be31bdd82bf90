"""A run's manifest with its latest amendment, from the peers that serve them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hetpeer.bootstrap.run.manifest import SignedManifest, read
from hetpeer.bootstrap.run.owner_signature import AMENDMENT, MANIFEST
from hetpeer.bootstrap.storage.file_service import FILE_TIMEOUT_S, fetch
from hetpeer.dht.base.errors import ExitCode, HetpeerError, LocalError, PeerLostError, RemoteError, short_id
from hetpeer.dht.discovery import Advert, Roster
from hetpeer.dht.identity.addresses import Address, parse_address
from hetpeer.dht.node.node import Node
from hetpeer.dht.run_index import RunIndex
from hetpeer.peer.arrival.destinations import MAX_PLACES, Destination, several_runs

TOO_OLD = "HP-RUN-026"
"""Code for: the manifest has settings that only a newer version knows."""
TRIES, RETRY_S = 5, 1.0
"""Times that the peers are asked for the manifest, and seconds between two of them."""
MAX_LISTED = 32
"""Most runs that are looked for at a time because the DHT lists them: anybody can register one."""
AMENDMENT_S = 8.0
MAX_ADVERTISED = 8
"""Most peers asked because the DHT names them: anybody can publish there."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchedManifest:
    """A run's manifest, and the peer that gave it."""

    signed: SignedManifest
    peer: str


async def fetch_manifest(
    node: Node,
    named: Sequence[Address],
    run: str = "",
    remembered: Destination | None = None,
    *,
    any_of_dht: bool = True,
) -> FetchedManifest:
    """The manifest of a run from the first peer that gives a valid one, with the latest amendment that any
    asked peer has.

    `run`: id of the run; empty: any. Asked are the peers at the `named` addresses, then `remembered` ones of
    a run, then those that the DHT has for the run; all of a group at once. If no run is named and no named
    peer is in one, the run may be the only one of their DHT (`any_of_dht`). A wrong answer of a peer that was
    not named is only logged. Raises `LocalError` HP-RUN-001, HP-RUN-002, HP-RUN-003 (damaged), HP-RUN-016
    (another run), HP-RUN-026 (of a newer version), HP-NET-006 (no peer serves one) or HP-ADDR-004 (several).
    """
    peers = list(dict.fromkeys(address.peer_id for address in named))
    goal = run or (remembered.run if remembered is not None else "")
    places = remembered.addresses if remembered is not None else ()
    known = [peer for peer in dict.fromkeys(place.peer_id for place in places) if peer not in peers]
    told: set[str] = set()
    silent = ""
    for attempt in range(TRIES):
        asked = [*peers, *known]
        refusals: dict[str, HetpeerError] = {}
        found = await _first(node, peers, run, refusals) or await _first(node, known, goal, refusals)
        if found is None and goal:
            others = [peer for peer in await _advertised(node, Roster(node, goal)) if peer not in asked]
            asked += others
            found = await _first(node, others, goal, refusals)
        if found is None and not goal and any_of_dht and attempt == TRIES - 1:  # a peer that starts has a run
            found = await _only_run(node, refusals)
        wrong = {peer: why for peer, why in refusals.items() if isinstance(why, LocalError)}
        if found is None and goal and (newer := [why for why in wrong.values() if why.code == TOO_OLD]):
            raise newer[0]  # its id was compared with the run's: every copy says the same
        if found is None and (blamed := [wrong[peer] for peer in peers if peer in wrong]):
            raise blamed[0]
        for peer in wrong.keys() - told:
            _log.warning(
                "peer %s gave no valid manifest: %s; why: %s",
                short_id(peer),
                wrong[peer].what,
                wrong[peer].why,
            )
        told.update(wrong)
        if found is not None:
            return replace(found, signed=await amended(node, found.signed, asked))
        silent = next((refusal.what for refusal in reversed(refusals.values())), silent)
        if attempt < TRIES - 1:
            await asyncio.sleep(RETRY_S)
    raise LocalError(
        "HP-NET-006",
        f"no peer found that serves run {goal}" if goal else "no peer at the given address serves a run",
        why=silent or "no address was given",
        fix="check the address with the person who gave it to you, or use an invite; a run that has just "
        "started is found in a moment",
        exit_code=ExitCode.NETWORK,
    )


async def _first(
    node: Node, peers: Sequence[str], run: str, refusals: dict[str, HetpeerError]
) -> FetchedManifest | None:
    """Manifest from the first of `peers` that gives it, or None; `refusals`: peer → error, is filled."""
    asking = [asyncio.ensure_future(_ask(node, peer, run, refusals)) for peer in peers]
    try:
        for answer in asyncio.as_completed(asking):
            found = await answer
            if found is not None:
                return found
        return None
    finally:
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _ask(node: Node, peer: str, run: str, refusals: dict[str, HetpeerError]) -> FetchedManifest | None:
    try:
        data, _ = await fetch(node, peer, "manifest", MANIFEST.max_bytes, FILE_TIMEOUT_S)
        return FetchedManifest(read(bytes(data), run, peer), peer)
    except HetpeerError as error:
        refusals[peer] = error
        return None


async def _only_run(node: Node, refusals: dict[str, HetpeerError]) -> FetchedManifest | None:
    """The manifest of the only run in the node's DHT; None if there is none. Raises `LocalError` HP-ADDR-004.

    A run counts if a peer that advertises in it gives its manifest. If too many are registered, others are
    looked for at each call.
    """
    try:
        listed = await RunIndex(node).read()
    except RemoteError as error:
        _log.debug("which runs there are: %s", error)
        return None
    looked = secrets.SystemRandom().sample(listed, min(MAX_LISTED, len(listed)))

    async def look(run: str) -> FetchedManifest | None:
        others = await _advertised(node, Roster(node, run, foreign=True))
        return await _first(node, others, run, refusals)

    there = [found for found in await asyncio.gather(*map(look, looked)) if found is not None]
    if len(there) > 1:
        names = {found.signed.run_id: found.signed.manifest.name for found in there}
        raise several_runs("the DHT of the given peers", names, "hetpeer join --bootstrap ADDR --run ID")
    return there[0] if there else None


async def _advertised(node: Node, roster: Roster) -> list[str]:
    """Peers that advertise in a run and could be met, self-declared reliable ones first. Never raises."""
    try:
        adverts = await roster.read()
    except RemoteError as error:
        _log.debug("who is in the run: %s", error)
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
    """`signed` with the latest valid amendment that any of `peers` has. Never raises."""

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


def advertised_places(peer: str, advert: Advert) -> list[Address]:
    """Addresses in the advert of `peer`; those of other peers and invalid ones are left out."""
    found = []
    for text in advert.addresses:
        try:
            address = parse_address(text)
        except LocalError:
            continue
        if address.peer_id == peer:
            found.append(address)
    return found
