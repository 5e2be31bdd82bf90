"""From an address to a volunteer at work: what `hetpeer join` does, in order.

Survey the machine, join the network, fetch and check the manifest, start the compute worker, take part, leave. Each
part is undone in the reverse order, whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetpeer.averaging.effects import Stop
from hetpeer.bootstrap.files import atomic_write
from hetpeer.bootstrap.manifest import MAX_MANIFEST_BYTES, SignedManifest, read
from hetpeer.bootstrap.serving import PROTOCOL as FILES
from hetpeer.bootstrap.serving import FileService, fetch
from hetpeer.bootstrap.shelf import RunShelf
from hetpeer.dht.addresses import Address
from hetpeer.dht.errors import ExitCode, LocalError, RemoteError
from hetpeer.dht.node import Node, NodeConfig
from hetpeer.dht.roster import Roster
from hetpeer.peer.adverts import publish_forever, volunteer_advert
from hetpeer.peer.home import Home
from hetpeer.peer.preparing import RunFiles
from hetpeer.peer.progress import VolunteerProgress
from hetpeer.peer.volunteer import Offer, Volunteer, rejection
from hetpeer.stages.execution import commands as c
from hetpeer.stages.execution import device
from hetpeer.stages.execution.compute import Compute, ComputeConfig

WORKER = "hetpeer.averaging.worker_main"
FAREWELL_S = 4.0
MANIFEST_TRIES = 5
MANIFEST_RETRY_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """What the volunteer asked for."""

    bootstrap: tuple[Address, ...]
    home: Path
    host: str = "0.0.0.0"  # noqa: S104 - other peers must reach us
    port: int = 0
    """0: any free port."""
    name: str = ""
    threads: int = 1
    device: str = "auto"
    ram_limit: float = 0.5
    """Bytes if above 1, else the share of the free memory."""


async def join(options: JoinOptions, leaving: asyncio.Event) -> Stop | None:
    """Take part until the run is over (its Stop) or `leaving` is set (None). Raises `LocalError`."""
    home = Home(options.home)
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(_running_node(options, home))
        signed = await fetch_manifest(node, options.bootstrap)
        remember_addresses(home, options.bootstrap)
        memory = _memory_offered(options.ram_limit)
        compute = await stack.enter_async_context(_running_compute(options, memory))
        speed = (await compute.submit(c.WarmUp())).flops_per_second
        info = await compute.submit(c.Info())
        run = home.run(signed)
        peers = [*(address.peer_id for address in options.bootstrap), *signed.manifest.coordinators]
        offer = Offer(memory_bytes=memory, flops_per_second=speed, name=options.name)
        volunteer = Volunteer(node, home, RunFiles(node, run, peers), compute, offer)
        await node.serve(FILES, FileService(RunShelf(run, volunteer.state)).handle)
        progress = VolunteerProgress(volunteer.member, signed.manifest, volunteer.figures)
        _log.info("run %s, %s, offering %d MiB", signed.manifest.name, info.device_name, memory >> 20)
        return await _take_part(
            volunteer, node, Roster(node, run.run_id), progress, leaving, info.device_name
        )


async def _take_part(
    volunteer: Volunteer,
    node: Node,
    roster: Roster,
    progress: VolunteerProgress,
    leaving: asyncio.Event,
    device_name: str,
) -> Stop | None:
    work = asyncio.ensure_future(volunteer.run())
    left = asyncio.ensure_future(leaving.wait())
    beside = [
        asyncio.ensure_future(
            publish_forever(roster, lambda: volunteer_advert(volunteer, node, device_name))
        ),
        asyncio.ensure_future(progress.show_forever()),
    ]
    try:
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            stop = _unwrap(work)
            if not stop.completed:
                raise rejection(stop)
            return stop
        _log.info("leaving: telling the swarm")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await volunteer.farewell()
        return None
    finally:
        tasks = [work, left, *beside]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _unwrap(work: asyncio.Future[Stop]) -> Stop:
    """The volunteer's result; of several errors at once the first one tells the story."""
    try:
        return work.result()
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group


async def fetch_manifest(node: Node, addresses: Sequence[Address]) -> SignedManifest:
    """The manifest of the run, from the first of `addresses` that gives a sound one.

    Raises `LocalError`: HP-RUN-002, HP-RUN-003 (damaged) or HP-NET-006 (nobody serves one).
    """
    last: RemoteError | None = None
    for attempt in range(MANIFEST_TRIES):
        for address in addresses:
            try:
                data, _ = await fetch(node, address.peer_id, "manifest", MAX_MANIFEST_BYTES)
                return read(bytes(data))
            except RemoteError as error:
                last = error
        if attempt < MANIFEST_TRIES - 1:
            await asyncio.sleep(MANIFEST_RETRY_S)
    raise LocalError(
        "HP-NET-006",
        "no peer at the given address serves a run",
        why=last.what if last else "no address was given",
        fix="check the address with whoever gave it to you",
        exit_code=ExitCode.NETWORK,
    )


def remember_addresses(home: Home, addresses: Sequence[Address]) -> None:
    """Keep the addresses that worked, for `hetpeer status` and the next join."""
    atomic_write(home.path / "addresses.json", json.dumps([str(a) for a in addresses]).encode())


def _memory_offered(limit: float) -> int:
    machine = device.survey()
    return int(limit) if limit > 1 else int(machine.ram_free_bytes * limit)


@contextlib.asynccontextmanager
async def _running_node(options: JoinOptions, home: Home) -> AsyncIterator[Node]:
    config = NodeConfig(host=options.host, port=options.port, peers=options.bootstrap)
    node = await Node.start(config, home.identity())
    try:
        yield node
    finally:
        await node.close()


@contextlib.asynccontextmanager
async def _running_compute(options: JoinOptions, memory: int) -> AsyncIterator[Compute]:
    config = ComputeConfig(device=options.device, threads=options.threads, arena_bytes=max(memory, 1 << 26))
    compute = await Compute.start(config, WORKER)
    try:
        yield compute
    finally:
        await compute.close()
