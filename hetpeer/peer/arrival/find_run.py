"""Joining the network of a run: a node in touch with the named peers, and the run's manifest.

A run that this home was in before is waited for, since a coordinator may be restarted. An address that was
never reached is most likely wrong, and that is reported soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from hetpeer.averaging.messages import CONTROL_PROTOCOL
from hetpeer.bootstrap.run.manifest import SignedManifest
from hetpeer.dht.base.errors import LocalError, RemoteError
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.discovery import Roster
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.peer.arrival.dial_rounds import Round, rounds
from hetpeer.peer.arrival.invites import Destination
from hetpeer.peer.arrival.known_runs import acquaintances, known_run, remember, remember_seen
from hetpeer.peer.arrival.manifest_fetch import fetch_manifest
from hetpeer.peer.arrival.reach_text import tell_forever
from hetpeer.peer.process.home import Home
from hetpeer.peer.transport.link import TENSORS

AWAY = frozenset({"HP-NET-002", "HP-NET-006"})
"""Codes for: no peer answers, or none that serves a run."""
DOUBTFUL = frozenset({"HP-RUN-001", "HP-RUN-002", "HP-RUN-003", "HP-RUN-016"})
"""Codes for: the peer gives no valid manifest."""
LOOK_S = 30.0
"""Seconds between two looks at the peers to remember."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A node that has joined the network of a run; `source` is the peer that gave the run's manifest."""

    node: Node
    signed: SignedManifest
    source: str


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
            remembered = before if turn.addresses != named.addresses else None
            try:
                arrival = await _arrive(replace(config, peers=turn.addresses), home, named, remembered, stack)
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
    before = "they have answered before; " if known else ""
    return f"{before}next try in {turn.pause_s:.0f} s"


async def _arrive(
    config: NodeConfig,
    home: Home,
    named: Destination,
    remembered: Destination | None,
    stack: contextlib.AsyncExitStack,
) -> FoundRun:
    async with contextlib.AsyncExitStack() as attempt:
        node = await attempt.enter_async_context(_running(config, home))
        found = await fetch_manifest(node, named.addresses, named.run, remembered)
        stack.push_async_exit(attempt.pop_all())
    return FoundRun(node, found.signed, found.peer)


@contextlib.asynccontextmanager
async def _running(config: NodeConfig, home: Home) -> AsyncIterator[Node]:
    node = await Node.start(config, home.identity())
    node.may_cut(CONTROL_PROTOCOL, TENSORS)
    node.may_go_directly(TENSORS)
    telling = TaskSet()
    telling.spawn(tell_forever(node, reliable=False), name="words on reachability")
    try:
        yield node
    finally:
        await telling.close()
        await node.close()


async def _remember_forever(arrival: FoundRun, home: Home) -> None:
    """Write down who is there, for the day on which those we joined by are not."""
    node, signed = arrival.node, arrival.signed
    roster = Roster(node, signed.run_id)
    while True:
        try:
            adverts = await roster.read()
            adverts.pop(node.peer_id, None)
            seen = acquaintances(adverts, signed.reliable)
            await asyncio.to_thread(remember_seen, home.path, signed.run_id, seen)
        except RemoteError as error:
            _log.debug("who is there: %s", error)
        except LocalError as error:  # there may be room the next time
            _log.warning("%s", error.line())
        await asyncio.sleep(LOOK_S)
