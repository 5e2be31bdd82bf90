"""Joining the network of a run: a node in touch with the named peers, and the run's manifest with its latest
amendment, from the peers that serve them.

A run that this home was in before is waited for, since a coordinator may be restarted. An address that was
never reached is most likely wrong, and that is reported soon. `tell_reach_forever` tells the person who
started a daemon whether others reach this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetpeer.averaging.messages import CONTROL_PROTOCOL
from hetpeer.bootstrap.run.manifest import SignedManifest, read
from hetpeer.bootstrap.run.owner_signature import AMENDMENT, MANIFEST
from hetpeer.bootstrap.storage.file_service import FILE_TIMEOUT_S, fetch
from hetpeer.dht.base.errors import ExitCode, HetpeerError, LocalError, PeerLostError, RemoteError, short_id
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.base.trouble_line import TroubleLine
from hetpeer.dht.discovery import Advert, Roster
from hetpeer.dht.identity.addresses import Address, parse_address
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.reach.reachability import ReachEstimate, ReachKind
from hetpeer.dht.run_index import RunIndex
from hetpeer.peer.arrival.destinations import (
    MAX_PLACES,
    MAX_SEEN,
    Destination,
    known_run,
    remember,
    remember_seen,
    several_runs,
    worth_giving,
)
from hetpeer.peer.process.console import say
from hetpeer.peer.process.home import Home
from hetpeer.peer.transport.link import TENSORS

ROUNDS = 5
"""Pauses of a volunteer that was never in the run: most likely the address is wrong."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
AWAY = frozenset({"HP-NET-002", "HP-NET-006"})
"""Codes for: no peer answers, or none that serves a run."""
DOUBTFUL = frozenset({"HP-RUN-001", "HP-RUN-002", "HP-RUN-003", "HP-RUN-016"})
"""Codes for: the peer gives no valid manifest."""
TOO_OLD = "HP-RUN-026"
"""Code for: the manifest has settings that only a newer version knows."""
PEERS_LOOK_S = 30.0
"""Seconds between two looks at the peers to remember."""
REACH_LOOK_S = 1.5
TRIES, RETRY_S = 5, 1.0
"""Times that the peers are asked for the manifest, and seconds between two of them."""
MAX_LISTED = 32
"""Most runs that are looked for at a time because the DHT lists them: anybody can register one."""
AMENDMENT_S = 8.0
MAX_ADVERTISED = 8
"""Most peers asked because the DHT names them: anybody can publish there."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Round:
    """Dial `addresses`, all at once. If that leads nowhere, go on after `pause_s`; None: give up."""

    addresses: tuple[Address, ...]
    pause_s: float | None


def rounds(named: tuple[Address, ...], remembered: tuple[Address, ...] | None) -> Iterator[Round]:
    """Rounds of dialling; without end for a home that was in the run before.

    `remembered`: addresses at which the run was found before; None: this home was never in it. The first
    round leaves them out, unless no address is named.
    """
    everybody = tuple(dict.fromkeys((*named, *(remembered or ()))))
    if named and everybody != named:
        yield Round(named, 0.0)
    pause_s, count = FIRST_PAUSE_S, 1
    while remembered is not None or count < ROUNDS:
        yield Round(everybody, pause_s)
        pause_s, count = min(2 * pause_s, LONGEST_PAUSE_S), count + 1
    yield Round(everybody, None)


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A node that has joined the network of a run; `source` is the peer that gave the run's manifest."""

    node: Node
    signed: SignedManifest
    source: str
    adverts: dict[str, Advert] = field(default_factory=dict)
    """Adverts of the others at the last look; it changes, if the node stays."""


@contextlib.asynccontextmanager
async def arrived(
    config: NodeConfig, home: Home, run: str = "", *, stays: bool = True
) -> AsyncIterator[FoundRun]:
    """Join by `config.peers`; the node is closed at the end. `run`: id of the run; empty: any.

    Without peers: back to that run, which this home was in. Raises `LocalError` as `Node.start` and
    `fetch_manifest` do. A home that was in the run tries until cancelled; others get HP-NET-002 or HP-NET-006
    after some rounds, as does everybody unless it `stays`. Nothing is remembered then.
    """
    named = Destination(config.peers, run)
    known = known_run(home.path, named)
    before = known.destination if known is not None else None
    async with contextlib.AsyncExitStack() as stack:
        places = before.addresses if before is not None else None
        everybody = tuple(dict.fromkeys((*named.addresses, *(places or ()))))
        for turn in rounds(named.addresses, places) if stays else rounds(everybody, None):
            only_named = turn.addresses == named.addresses != everybody
            remembered = None if only_named else before
            try:
                there = replace(config, peers=turn.addresses)
                arrival = await _arrive(there, home, named, remembered, stack, any_of_dht=known is None)
            except LocalError as error:
                others_left = turn.pause_s == 0.0 and error.code in DOUBTFUL
                if turn.pause_s is None or not (others_left or error.code in AWAY):
                    raise
                _log.warning("%s: %s; %s", error.what, error.why, _what_next(turn, known is not None))
                await asyncio.sleep(turn.pause_s)
            else:
                if stays:
                    remember(home.path, arrival.signed.run_id, named.addresses)
                    company = TaskSet()
                    company.spawn(_remember_forever(arrival, home), name="peers to be remembered")
                    stack.push_async_callback(company.close)
                yield arrival
                return


def _what_next(turn: Round, known: bool) -> str:
    if not turn.pause_s:
        return "trying the addresses remembered from the last time"
    before = "this run has answered before; " if known else ""
    return f"{before}next try in {turn.pause_s:.0f} s"


async def _arrive(
    config: NodeConfig,
    home: Home,
    named: Destination,
    remembered: Destination | None,
    stack: contextlib.AsyncExitStack,
    *,
    any_of_dht: bool,
) -> FoundRun:
    """Start a node and fetch the manifest; `stack` keeps the node running if that succeeds."""
    async with contextlib.AsyncExitStack() as attempt:
        node = await attempt.enter_async_context(_running(config, home))
        found = await fetch_manifest(node, named.addresses, named.run, remembered, any_of_dht=any_of_dht)
        stack.push_async_exit(attempt.pop_all())
    return FoundRun(node, found.signed, found.peer)


@contextlib.asynccontextmanager
async def _running(config: NodeConfig, home: Home) -> AsyncIterator[Node]:
    """Context with a running volunteer node, which tells its reachability; closed at the end."""
    node = await Node.start(config, home.identity())
    node.may_cut(CONTROL_PROTOCOL, TENSORS)
    node.may_go_directly(TENSORS)
    telling = TaskSet()
    telling.spawn(tell_reach_forever(node, reliable=False), name="words on reachability")
    try:
        yield node
    finally:
        await telling.close()
        await node.close()


async def _remember_forever(arrival: FoundRun, home: Home) -> None:
    """Write down the present peers: those that we joined by may be gone at the next start."""
    node, signed = arrival.node, arrival.signed
    roster = Roster(node, signed.run_id)
    unsaved = TroubleLine(_log, "the addresses of the run's peers are written down again")
    while True:
        try:
            adverts = await roster.read()
            adverts.pop(node.peer_id, None)
            arrival.adverts.clear()
            arrival.adverts.update(adverts)
            seen = acquaintances(adverts, signed.reliable)
            await asyncio.to_thread(remember_seen, home.path, signed.run_id, seen)
            unsaved.ended()
        except RemoteError as error:
            _log.debug("who is there: %s", error)
        except LocalError as error:  # there may be room the next time
            unsaved.lasts(error, f"the addresses of the run's peers are not written down: {error}")
        await asyncio.sleep(PEERS_LOOK_S)


def acquaintances(adverts: Mapping[str, Advert], reliable: Collection[str]) -> list[Address]:
    """Addresses to remember: of the `reliable` peers, then of public peers, then of others."""

    def rank(peer: str) -> int:
        return 0 if peer in reliable else 1 if adverts[peer].reach == ReachKind.PUBLIC else 2

    found: list[Address] = []
    for peer in sorted(adverts, key=rank)[:MAX_SEEN]:
        found += worth_giving(advertised_places(peer, adverts[peer]))[:MAX_PLACES]
    return found


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


# ── the manifest ────────────────────────────────────────────────────────────────────────────────────────────


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


# ── reachability ────────────────────────────────────────────────────────────────────────────────────────────


def reach_words(estimate: ReachEstimate, relays: Sequence[str]) -> str:
    """One line about `estimate`, with the relays (peer ids) through which we are reached."""
    tried = f"{estimate.peers} peer{'s' if estimate.peers != 1 else ''} tried"
    match estimate.reach:
        case ReachKind.PUBLIC:
            return f"others reach this machine at {estimate.ip} port {estimate.port} ({tried})"
        case ReachKind.PRIVATE if relays:
            names = ", ".join(short_id(relay) for relay in relays)
            blocked = f"no connection from outside reaches this machine ({tried})"
            return f"{blocked}; others reach it through the relay {names}"
        case ReachKind.PRIVATE:
            blocked = f"no connection from outside reaches this machine ({tried})"
            return f"{blocked}, and there is no relay: it can only call others"
        case _:
            return "it is not known whether others can reach this machine: no peer could try"


async def tell_reach_forever(node: Node, *, reliable: bool) -> None:
    """Show the reachability once, and again after each change that lasts for two looks. Never returns.

    A `reliable` peer shows nothing while it is unknown, and warns if others cannot connect.
    """
    told, before = "", ""
    while True:
        line = reach_words(node.reach_estimate, node.relays)
        known = node.reach_estimate.reach is not ReachKind.UNKNOWN
        if line not in (told, "") and (not told or line == before) and (known or not reliable):
            told = line
            if reliable and node.reach_estimate.reach is ReachKind.PRIVATE:
                _log.warning(
                    "%s; volunteers must be able to connect to this peer: forward its port in your router",
                    line,
                )
            else:
                say(line)
        before = line
        await asyncio.sleep(REACH_LOOK_S)
