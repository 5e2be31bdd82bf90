"""The reliable peer: what `hetpeer bootstrap DIR` does. Rendezvous, files and states, and the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetpeer.bootstrap.coordinator import Halt
from hetpeer.bootstrap.log import Log
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.bootstrap.service import CoordinatorService
from hetpeer.bootstrap.serving import PROTOCOL as FILES
from hetpeer.bootstrap.serving import FileService
from hetpeer.bootstrap.shelf import RunShelf
from hetpeer.dht.addresses import Address
from hetpeer.dht.clock import SystemClock
from hetpeer.dht.errors import ExitCode, LocalError
from hetpeer.dht.identity import Identity
from hetpeer.dht.node import Node, NodeConfig
from hetpeer.dht.roster import Roster
from hetpeer.peer.adverts import coordinator_advert, publish_forever
from hetpeer.peer.progress import CoordinatorProgress
from hetpeer.peer.reach import tell_forever

LINGER_S = 3.0
"""After the run's end the node still answers for a moment, so that volunteers hear the last word."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapOptions:
    """What the run's author asked for."""

    directory: Path
    host: str
    port: int
    peers: tuple[Address, ...] = ()


async def serve_run(
    options: BootstrapOptions, leaving: asyncio.Event, announce: Callable[[str], None]
) -> Halt | None:
    """Coordinate the run until it is over (its Halt) or `leaving` is set (None).

    `announce` gets the address to join at, once everything answers. Raises `LocalError`.
    """
    run = RunDirectory.open(options.directory)
    await asyncio.to_thread(run.verify)
    log = Log.open(run.log_path)
    with contextlib.closing(log):
        node = await Node.start(_config(options), Identity.load(run.identity_path))
        try:
            service = CoordinatorService(node, run, log, SystemClock())
            await node.serve(FILES, FileService(RunShelf(run, service.state)).handle)
            return await _coordinate(service, node, run, leaving, announce)
        finally:
            await node.close()


async def _coordinate(
    service: CoordinatorService,
    node: Node,
    run: RunDirectory,
    leaving: asyncio.Event,
    announce: Callable[[str], None],
) -> Halt | None:
    roster = Roster(node, run.run_id)
    work = asyncio.ensure_future(service.run())
    left = asyncio.ensure_future(leaving.wait())
    beside = [
        asyncio.ensure_future(publish_forever(roster, lambda: coordinator_advert(service, node))),
        asyncio.ensure_future(CoordinatorProgress(service).show_forever()),
        asyncio.ensure_future(tell_forever(node, reliable=True)),
    ]
    try:
        ready = asyncio.ensure_future(service.serving.wait())
        await asyncio.wait({work, left, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if ready.done():
            announce(_join_address(node))
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return None
        halt = work.result()
        if not halt.completed:
            raise LocalError("HP-RUN-011", "the run was halted", why=halt.why, exit_code=ExitCode.RUN_CLOSED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await left
        return halt
    finally:
        tasks = [work, left, *beside]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _config(options: BootstrapOptions) -> NodeConfig:
    """A reliable peer must be reachable, so it says that it is, and relays for those who are not."""
    alone = ipaddress.ip_address(options.host).is_loopback  # all peers are on this machine
    return NodeConfig(
        host=options.host,
        port=options.port,
        peers=options.peers,
        alone_ok=True,
        reachability="auto" if alone else "public",
    )


def _join_address(node: Node) -> str:
    """The address to give away: one that others can reach comes before the loopback one."""
    addresses = node.addresses()
    return next((a for a in addresses if "/127.0.0.1/" not in a), addresses[0])
