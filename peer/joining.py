"""From an address to a volunteer at work: what `hetpeer join` does, in order.

Survey the machine, join the network, fetch and check the manifest, start the compute worker, take part, leave. Each
part is undone in the reverse order, whatever happens. A worker that dies (most likely: out of memory) is started again
a few times, each time for a new life of the volunteer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpeer.averaging.effects import Stop
from hetpeer.bootstrap.council import Council
from hetpeer.bootstrap.serving import PROTOCOL as FILES
from hetpeer.bootstrap.serving import FileService
from hetpeer.bootstrap.shelf import RunShelf
from hetpeer.dht.addresses import Address
from hetpeer.dht.clock import SystemClock
from hetpeer.dht.errors import ExitCode, LocalError
from hetpeer.dht.node import Node, NodeConfig
from hetpeer.dht.roster import Roster
from hetpeer.dht.tasks import TaskSet
from hetpeer.peer.adverts import publish_forever, volunteer_advert
from hetpeer.peer.arriving import arrived
from hetpeer.peer.evidence import Evidence
from hetpeer.peer.figures import Offer
from hetpeer.peer.foresight import prepare_ahead
from hetpeer.peer.home import Home
from hetpeer.peer.lifecycle import unless
from hetpeer.peer.preparing import RunFiles
from hetpeer.peer.progress import VolunteerProgress
from hetpeer.peer.tracing import Trace
from hetpeer.peer.volunteer import Volunteer
from hetpeer.stages.execution import commands as c
from hetpeer.stages.execution import device
from hetpeer.stages.execution.compute import Compute, ComputeConfig, WorkerDiedError

WORKER = "hetpeer.averaging.worker_main"
FAREWELL_S = 3.0
MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0
"""A worker that dies more than MAX_RESTARTS times in so long is not started again."""
MIN_ARENA_BYTES = 1 << 26

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
    disk_limit: float = 0.1
    """For tensors that do not fit into memory: bytes if above 1, else the share of the free disk."""
    trace: bool = False
    """Write down what is done when (tracing.py)."""
    metrics: tuple[str, int] | None = None
    """Host and port at which its metrics are served."""


@dataclass(slots=True)
class _Life:
    """The volunteer that lives now, or lived last."""

    volunteer: Volunteer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Presence:
    """Our place in the network and in the run's files: what outlives the compute worker."""

    node: Node
    home: Home
    files: RunFiles
    roster: Roster
    evidence: Evidence
    trace: Trace
    progress: VolunteerProgress
    life: _Life


async def join(options: JoinOptions, leaving: asyncio.Event) -> Stop | None:
    """Take part until the run is over (its Stop) or `leaving` is set (None). Raises `LocalError`."""
    memory = _memory_offered(options.ram_limit)
    async with contextlib.AsyncExitStack() as stack:
        presence = await unless(leaving, _enter(options, stack))
        if presence is None:
            return None
        deaths: deque[float] = deque(maxlen=MAX_RESTARTS)
        while True:
            async with contextlib.AsyncExitStack() as life:
                try:
                    started = await unless(leaving, _start_compute(options, memory, life))
                    return None if started is None else await _live(presence, *started, leaving)
                except WorkerDiedError as error:
                    often = len(deaths) == MAX_RESTARTS and time.monotonic() - deaths[0] < RESTART_WINDOW_S
                    if often or error.status >= 0:  # one that ended by itself would do so again
                        raise
                    deaths.append(time.monotonic())
                    _log.warning("%s; a new one is started", error.what)


async def _enter(options: JoinOptions, stack: contextlib.AsyncExitStack) -> _Presence:
    """Join the network, and get to know the run."""
    home = Home(options.home)
    identity = home.identity()
    config = NodeConfig(host=options.host, port=options.port, peers=options.bootstrap, reachability="ask")
    node, signed = await stack.enter_async_context(arrived(config, home))
    run = home.run(signed)
    evidence = stack.enter_context(contextlib.closing(Evidence(home, run, identity)))
    path = home.trace_path(run, os.getpid()) if options.trace else None
    trace = stack.enter_context(
        contextlib.closing(Trace(SystemClock(), path, peer=identity.peer_id, name=options.name))
    )
    named = [address.peer_id for address in options.bootstrap]
    files, life = RunFiles(node, run, Council(signed, run.path), named), _Life()
    if options.metrics is not None:  # nothing of it is loaded otherwise
        from hetpeer.peer.web.daemons import volunteer_served

        await stack.enter_async_context(
            volunteer_served(options.metrics, node, files, options.home, lambda: life.volunteer)
        )
    return _Presence(
        node=node,
        home=home,
        files=files,
        roster=Roster(node, run.run_id),
        evidence=evidence,
        trace=trace,
        progress=VolunteerProgress(signed.manifest),
        life=life,
    )


async def _start_compute(
    options: JoinOptions, memory: int, life: contextlib.AsyncExitStack
) -> tuple[Compute, Offer, str]:
    """A compute worker, what this machine can offer with it, and the name of its device."""
    compute = await life.enter_async_context(_running_compute(options, memory))
    speed = (await compute.submit(c.WarmUp())).flops_per_second
    info = await compute.submit(c.Info())
    return (
        compute,
        Offer(
            memory_bytes=memory,
            flops_per_second=speed,
            disk_bytes=_disk_offered(options),
            name=options.name,
        ),
        info.device_name,
    )


async def _live(
    presence: _Presence, compute: Compute, offer: Offer, device_name: str, leaving: asyncio.Event
) -> Stop | None:
    """Take part with one compute worker. Raises also `WorkerDiedError`."""
    files, node, roster = presence.files, presence.node, presence.roster
    volunteer = Volunteer(node, presence.home, files, compute, offer, presence.evidence, presence.trace)
    presence.life.volunteer = volunteer
    await node.serve(FILES, FileService(RunShelf(files.run, files.council, volunteer.state)).handle)
    name, memory = files.run.manifest.name, offer.memory_bytes
    _log.info("run %s, %s, offering %d MiB", name, device_name, memory >> 20)
    ahead = prepare_ahead(roster, files, memory, lambda: volunteer.admitted)
    beside = [
        publish_forever(roster, lambda: volunteer_advert(volunteer, node, device_name)),
        presence.progress.show_forever(volunteer),
    ]
    return await _take_part(volunteer, ahead, beside, leaving)


async def _take_part(
    volunteer: Volunteer,
    ahead: Coroutine[Any, Any, object],
    beside: Sequence[Coroutine[Any, Any, None]],
    leaving: asyncio.Event,
) -> Stop | None:
    """Work until the run is over or we are asked to leave; `ahead` may find out that nothing fits us."""
    work = asyncio.ensure_future(volunteer.run())
    left = asyncio.ensure_future(leaving.wait())
    preparing = asyncio.ensure_future(ahead)
    company = TaskSet()
    for work_beside in beside:
        company.spawn(work_beside, name="advert or progress")
    try:
        await asyncio.wait({work, left, preparing}, return_when=asyncio.FIRST_COMPLETED)
        if preparing.done():
            preparing.result()
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            stop = work.result()
            if not stop.completed:
                raise _rejection(stop)
            return stop
        _log.info("leaving: telling the swarm")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await volunteer.farewell()
        return None
    finally:
        await company.close()
        tasks: list[asyncio.Future[Any]] = [work, left, preparing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _memory_offered(limit: float) -> int:
    machine = device.survey()
    return int(limit) if limit > 1 else int(machine.ram_free_bytes * limit)


def _disk_offered(options: JoinOptions) -> int:
    limit = options.disk_limit
    return int(limit) if limit > 1 else int(shutil.disk_usage(options.home).free * limit)


@contextlib.asynccontextmanager
async def _running_compute(options: JoinOptions, memory: int) -> AsyncIterator[Compute]:
    config = ComputeConfig(
        device=options.device, threads=options.threads, arena_bytes=max(memory, MIN_ARENA_BYTES)
    )
    compute = await Compute.start(config, WORKER)
    try:
        yield compute
    finally:
        await compute.close()


def _rejection(stop: Stop) -> LocalError:
    """Why we may not take part, as the error that ends the command."""
    if stop.rejected == "version":
        return LocalError(
            "HP-RUN-002",
            "the run speaks another version",
            why=stop.why,
            fix="use the version of hetpeer the run was made for",
            exit_code=ExitCode.VERSION,
        )
    return LocalError(
        "HP-RUN-010",
        "the run does not go on",
        why=stop.why,
        fix="ask the run's author",
        exit_code=ExitCode.RUN_CLOSED,
    )
