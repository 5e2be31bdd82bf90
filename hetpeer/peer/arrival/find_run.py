"""Joining the network of a run: a node in touch with the named peers, which has the run's manifest.

A run that this home was in before is waited for, since a coordinator may be restarted. An address that was
never reached is most likely wrong, and that is reported soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from hetpeer.averaging.messages import CONTROL_PROTOCOL
from hetpeer.bootstrap.run.manifest import SignedManifest
from hetpeer.dht.base.errors import LocalError, RemoteError
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.base.trouble_line import TroubleLine
from hetpeer.dht.discovery import Advert, Roster
from hetpeer.dht.identity.addresses import Address
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.reach.reachability import ReachKind
from hetpeer.peer.arrival.destinations import (
    MAX_PLACES,
    MAX_SEEN,
    Destination,
    known_run,
    remember,
    remember_seen,
    worth_giving,
)
from hetpeer.peer.arrival.manifest_fetch import advertised_places, fetch_manifest
from hetpeer.peer.arrival.told_reach import tell_reach_forever
from hetpeer.peer.process.home import Home
from hetpeer.peer.transport.link import TENSORS

ROUNDS = 5
"""Pauses of a volunteer that was never in the run: most likely the address is wrong."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
AWAY = frozenset({"HP-NET-002", "HP-NET-006"})
"""Codes for: no peer answers, or none that serves a run."""
DOUBTFUL = frozenset({"HP-RUN-001", "HP-RUN-002", "HP-RUN-003", "HP-RUN-016"})
"""Codes for: the peer gives no valid manifest."""
PEERS_LOOK_S = 30.0
"""Seconds between two looks at the peers to remember."""

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
