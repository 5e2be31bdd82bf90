"""Words for the person who started a daemon: whether others reach this machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from hetpeer.dht.base.errors import short_id
from hetpeer.dht.node.node import Node
from hetpeer.dht.reach.reachability import ReachEstimate, ReachKind
from hetpeer.peer.process.console import say

REACH_LOOK_S = 1.5

_log = logging.getLogger(__name__)


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
