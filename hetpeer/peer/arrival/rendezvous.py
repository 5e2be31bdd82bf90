"""Rendezvous: a node at a fixed address, `hetpeer bootstrap` without a run (docs/joining.md).

It takes part in the DHT, relays, and tells other peers whether they are reachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.identity.addresses import Address, is_far, parse_address
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.peer.arrival.told_reach import tell_reach_forever
from hetpeer.peer.control.owned_daemon import AttendedDaemon, attended
from hetpeer.peer.limits.kept_options import keep_options
from hetpeer.peer.limits.node_rates import RATES, ServerRates
from hetpeer.peer.limits.setting_layers import DEFAULTS, MergedSettings
from hetpeer.peer.process.console import say
from hetpeer.peer.process.home import Home


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousOptions:
    """Options of a rendezvous. `peers`: other rendezvous."""

    home: Path
    host: str
    port: int
    peers: tuple[Address, ...] = ()
    limits: MergedSettings = DEFAULTS
    """Limits of its line (`peer/limits/node_rates.py`)."""


async def serve_rendezvous(
    options: RendezvousOptions, leaving: asyncio.Event, announce: Callable[[str], None]
) -> None:
    """Serve until `leaving` is set; `announce` gets the address. Raises as `attended` and `Node.start`."""
    config, home = open_config(options.host, options.port, options.peers), Home(options.home)
    identity = home.rendezvous_identity()
    with disk_errors(home.rendezvous):
        home.rendezvous.mkdir(exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(attended(home.rendezvous, home.rendezvous_key, leaving))
        rates = limited(daemon, home.rendezvous, options.limits)
        node = await Node.start(config, identity)
        stack.push_async_callback(node.close)
        rates.use(node.listener.throttle)
        telling = TaskSet()
        stack.push_async_callback(telling.close)
        telling.spawn(tell_reach_forever(node, reliable=True), name="words on reachability")
        daemon.does("serving")
        daemon.ready(node.addresses)
        announce(join_address(node))
        await leaving.wait()


def limited(daemon: AttendedDaemon, folder: Path, limits: MergedSettings) -> ServerRates:
    """The rates of `daemon`, which its owner may change; options are kept for its next start in `folder`."""
    rates = ServerRates.of(limits)
    daemon.limited_by(rates.change, lambda: rates.told)
    for line in keep_options(folder, limits, RATES):
        say(line)
    return rates


def open_config(host: str, port: int, peers: tuple[Address, ...]) -> NodeConfig:
    """Node config of a peer that must be reachable: declared public, it relays and may be first of all."""
    config = NodeConfig(host=host, port=port, direct_port=0, peers=peers, alone_ok=True)
    alone = ipaddress.ip_address(config.host).is_loopback  # all peers are on this machine
    return config if alone else replace(config, reachability="public")


def join_address(node: Node) -> str:
    """The address to give away: one that others can reach comes before the loopback one."""
    addresses = node.addresses()
    return next((a for a in addresses if "/127.0.0.1/" not in a), addresses[0])


def near_address(node: Node) -> str:
    """The address for a peer on the same machine: a router need not let it in at the one that it forwards."""
    addresses = [parse_address(address) for address in node.addresses()]
    return str(min(addresses, key=is_far))
