"""One life of a volunteer: from the start of its compute worker to its end, as the owner wishes.

The machine offers the run what the owner's limits leave of its memory, disk and uplink.

An early end begins with the suspension of the worker: from then on it takes no processor time, and other
volunteers compute its unfinished work again (docs/daemon.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hetpeer.averaging.effects import Stop
from hetpeer.averaging.member.member import Phase
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.step_workload import demand_of
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.peer.control.owned_daemon import Does
from hetpeer.peer.daemon.limits_in_force import LOOK_S, LimitsInForce
from hetpeer.peer.daemon.machine_offer import (
    OwnersLimits,
    arithmetics,
    boot_id,
    computes_on,
    device_names,
    main_memory,
    processor_of,
    rate_offered,
)
from hetpeer.peer.daemon.measured_line import keep_traffic, measured_line
from hetpeer.peer.daemon.owner_wishes import DaemonState, VolunteerDaemon, Wish
from hetpeer.peer.daemon.presence import Presence
from hetpeer.peer.limits.amounts import bytes_text, rate, share
from hetpeer.peer.limits.settings import WORKER, Settings
from hetpeer.peer.probing.coordinate_keeper import direct_trips, keep_moving
from hetpeer.peer.probing.kept_line import KeptLine
from hetpeer.peer.process.console import say
from hetpeer.peer.process.home import Home
from hetpeer.peer.process.lifecycle import freeze_memory, unless
from hetpeer.peer.training.early_placement import prepare_ahead
from hetpeer.peer.training.self_advert import (
    notable_of_volunteer,
    publish_forever,
    volunteer_advert,
    workless_advert,
)
from hetpeer.peer.training.volunteer import Volunteer
from hetpeer.peer.training.volunteer_figures import Offer, memory_text
from hetpeer.stages.block.processor_quota import quota
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc.compute import Compute, ComputeConfig

FAREWELL_S = 3.0
HAND_OVER_S = 6.0
"""Seconds that a volunteer that stops stays until the state that it alone holds is stored."""
FINISH_HAND_OVER_S = 240.0
"""The same, of a volunteer that was asked to finish."""
FINISH_S = 600.0
"""Most seconds that a volunteer asked to finish waits for the running step."""
MIN_ARENA_BYTES = 1 << 26
PACE_S = 0.7
"""Period of work and rest under a power limit: far below a lease, out of phase with power readings."""

NOT_HANDED_OVER = (
    "left before the coordinator confirmed that others have the state of these blocks: "
    "if nobody has it, the run goes back to its last checkpoint"
)

_log = logging.getLogger(__name__)


async def live(presence: Presence, daemon: VolunteerDaemon, governing: LimitsInForce) -> Stop | None:
    """Take part with one compute worker until the run is over (returns its Stop) or the wish is no longer
    work (None).

    `governing` has the settings and the share of its time that the worker may work.

    Raises `LocalError`, and `WorkerDiedError` with nothing of the worker left.
    """
    daemon.does(DaemonState.CHECKING)
    async with contextlib.AsyncExitStack() as life:
        other = daemon.until(Wish.PAUSE, Wish.FINISH, Wish.STOP)
        async with shown_as(DaemonState.CHECKING, presence, governing):
            started = await unless(other, _prepared(presence, governing, life))
        return None if started is None else await _live(presence, *started, daemon, governing)


async def _prepared(
    presence: Presence, governing: LimitsInForce, life: contextlib.AsyncExitStack
) -> tuple[Compute, Offer, str]:
    """Start compute workers, and measure the line meanwhile; as `start_compute`."""
    measuring = asyncio.ensure_future(measured_line(presence, governing))
    try:
        manifest = presence.files.run.manifest
        compute, offer, names = await start_compute(presence.home, governing, manifest, life)
        return compute, with_line(offer, await measuring, governing.settings), names
    finally:
        measuring.cancel()


@contextlib.asynccontextmanager
async def shown_as(state: DaemonState, presence: Presence, governing: LimitsInForce) -> AsyncIterator[None]:
    """Publish an advert meanwhile: starting a worker and spreading a first advert both take seconds."""
    advert = partial(workless_advert, presence.node, governing.settings.node.name, state.value)
    company = TaskSet()
    company.spawn(publish_forever(presence.roster, advert), name="advert")
    try:
        yield
    finally:
        await company.close()


async def start_compute(
    home: Home, governing: LimitsInForce, manifest: Manifest, life: contextlib.AsyncExitStack
) -> tuple[Compute, Offer, str]:
    """Start compute workers; returns them, the offer to the run and the devices' names.

    Raises `LocalError` HP-GPU-*, and HP-MEM-004 if main memory is too little for the program itself.
    """
    settings = governing.settings
    limits = OwnersLimits.of(settings)
    ram, disk = limits.ram_bytes(), limits.disk_bytes(home.path)
    compute = await life.enter_async_context(_running_compute(settings, ram, home.path, disk))
    try:
        speeds = tuple(done.flops_per_second for done in await compute.submit_to_each(c.WarmUp()))
        infos = await compute.infos()
    except asyncio.CancelledError:
        compute.suspend()
        raise
    uuids = tuple(info.device_uuid for info in infos if info.device_uuid)
    governing.computes_on(settings.compute.device, uuids)
    main = main_memory(ram, infos)
    memory = limits.offered(infos, main, disk, [demand_of(manifest, block) for block in manifest.blocks])
    if ram < limits.ram_wanted():
        say(f"only {bytes_text(ram)} of main memory are free, and limits.ram allows {limits.ram}")
    say(computes_on(infos, main, memory))
    offer = Offer(
        memory=memory,
        main=main,
        flops_per_second=sum(speeds),
        rooms=tuple(limits.rooms(infos, main)),
        beside_gpus=limits.beside_gpus(infos, main),
        gpu_bytes=limits.gpu_bytes(infos, main),
        speeds=speeds,
        name=settings.node.name,
        arithmetic=arithmetics(infos),
        choice=settings.compute.offload,
        processor=processor_of(infos, boot_id(), os.cpu_count() or 1, quota()),
    )
    return compute, with_line(offer, KeptLine.load(home.path), settings), device_names(infos)


def with_line(offer: Offer, line: KeptLine, settings: Settings) -> Offer:
    """`offer` with what `line` carries within the owner's limits. Pure."""
    return replace(
        offer,
        uplink=rate_offered(line.uplink, rate(settings.limits.up)),
        downlink=rate_offered(line.downlink, rate(settings.limits.down)),
    )


async def _live(
    presence: Presence,
    compute: Compute,
    offer: Offer,
    device_name: str,
    daemon: VolunteerDaemon,
    governing: LimitsInForce,
) -> Stop | None:
    """One life of a volunteer with a running worker. Returns the end of the run, or None."""
    files, node, roster = presence.files, presence.node, presence.roster
    volunteer = Volunteer(
        node,
        presence.home,
        files,
        compute,
        offer,
        presence.credentials,
        presence.evidence,
        presence.trace,
        lambda: presence.coordinate.numbers,
    )
    freeze_memory()
    name, memory = files.run.manifest.name, memory_text(offer.memory)
    _log.info("run %s: computes on %s, offers %s", name, device_name, memory)
    member = volunteer.member
    daemon.follow(lambda: doing(member.phase, in_touch=volunteer.session.is_up, spared=member.is_spared))
    ahead = prepare_ahead(roster, files, offer, lambda: volunteer.admitted, lambda: presence.coordinate.known)
    beside = [
        presence.serve(volunteer.state),
        publish_forever(
            roster,
            lambda: volunteer_advert(volunteer, node, device_name, presence.coordinate.numbers),
            lambda: notable_of_volunteer(volunteer),
            volunteer.happens,
        ),
        presence.progress.show_forever(volunteer),
        presence.mind_sleep(volunteer.rejoin),
        keep_moving(
            node,
            presence.coordinate,
            presence.home.path,
            lambda: presence.adverts,
            lambda: direct_trips({p: link.trip_s for p, link in volunteer.links.links.items()}, node),
            lambda: volunteer.links.outflow.seen or offer.uplink,
            metered=governing.metered,
        ),
        pace_forever(compute, lambda: governing.share),
    ]
    presence.life.volunteer = volunteer
    try:
        return await _take_part(volunteer, compute, ahead, beside, daemon)
    finally:
        presence.life.volunteer = None
        keep_traffic(presence.home, volunteer.links.reducing.rate)


async def _take_part(
    volunteer: Volunteer,
    compute: Compute,
    ahead: Coroutine[Any, Any, object],
    beside: Sequence[Coroutine[Any, Any, None]],
    daemon: VolunteerDaemon,
) -> Stop | None:
    """Work until the run is over or something else is wished; `ahead` may find out that nothing fits us."""
    work = asyncio.ensure_future(volunteer.run())
    asked = asyncio.ensure_future(_called_off(volunteer, daemon))
    preparing = asyncio.ensure_future(ahead)
    company = TaskSet()
    for work_beside in beside:
        company.spawn(work_beside, name="beside the work")
    try:
        await asyncio.wait({work, asked, preparing}, return_when=asyncio.FIRST_COMPLETED)
        if preparing.done():
            preparing.result()
            await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            stop = work.result()
            if not stop.completed:
                raise rejection(stop)
            return stop
        held = bool(daemon.holding)
        if held:
            compute.suspend()  # the owner takes the machine back now
        _log.info("leaving: saying goodbye to the swarm")
        await say_farewell(volunteer, 0.0 if held else HAND_OVER_S)
        compute.suspend()
        if (trouble := asked.result()) is not None:
            raise trouble
        return None
    finally:
        await company.close()
        tasks: list[asyncio.Future[Any]] = [work, asked, preparing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _called_off(volunteer: Volunteer, daemon: VolunteerDaemon) -> LocalError | None:
    """Return when this life is to end: as the owner wishes, or with the error of a disk without room.

    What we alone hold is stored first, unless the owner takes the machine back or stops us. After an order to
    finish this begins when the current step is over.
    """
    wish = await unless(volunteer.out_of_room(), daemon.until(Wish.PAUSE, Wish.FINISH, Wish.STOP))
    trouble = volunteer.trouble if wish is None else None
    if trouble is not None:
        _log.warning("%s; it hands over what it alone holds, and leaves", trouble.what)
    if wish is Wish.FINISH:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                await unless(daemon.until(Wish.STOP), volunteer.step_over())
    if wish in (Wish.FINISH, None):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_HAND_OVER_S):
                await unless(daemon.until(Wish.STOP), volunteer.session.farewell(FINISH_HAND_OVER_S))
    if wish is Wish.FINISH:
        daemon.stop()
    return trouble


async def say_farewell(volunteer: Volunteer, within_s: float) -> None:
    """Leave, within `within_s` seconds if we alone hold a state; say so if it could not be handed over."""
    session = volunteer.session
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(FAREWELL_S, within_s)):
            await session.farewell(within_s)
    if within_s > 0.0 and volunteer.member.version and not (session.released and session.released.safe):
        say(NOT_HANDED_OVER)


async def pace_forever(compute: Compute, share: Callable[[], float]) -> None:
    """Let the worker rest for the part of each PACE_S that `share` leaves. Never returns."""
    while True:
        working_s = PACE_S * share()
        await asyncio.sleep(working_s if working_s < PACE_S else LOOK_S)
        if working_s < PACE_S:
            compute.rest()
            try:
                await asyncio.sleep(PACE_S - working_s)
            finally:
                compute.wake()


def doing(phase: Phase, *, in_touch: bool, spared: bool = False) -> Does:
    """State and reason of a volunteer in `phase`, `in_touch` with a coordinator or not. Pure.

    `spared`: it is a backup.
    """
    match phase:
        case Phase.STOPPED:
            return DaemonState.STOPPED, ""
        case Phase.JOINING:
            return DaemonState.JOINING, "" if in_touch else "no_coordinator"
        case _ if not in_touch:
            return DaemonState.WAITING, "no_coordinator"
        case _ if spared:
            return DaemonState.WAITING, "backup"
        case Phase.PREPARING | Phase.SYNCING:
            return DaemonState.SYNCING, ""
        case Phase.READY:
            return DaemonState.WAITING, "no_peers"
        case _:
            return DaemonState.TRAINING, ""


@contextlib.asynccontextmanager
async def _running_compute(settings: Settings, ram: int, folder: Path, disk: int) -> AsyncIterator[Compute]:
    """Context with a compute worker, ended at its end."""
    config = ComputeConfig(
        device=settings.compute.device,
        threads=settings.threads,
        nice=settings.limits.nice,
        gpu_memory=share(settings.limits.gpu_memory),
        arena_bytes=max(ram, MIN_ARENA_BYTES),
        folder=folder,
        disk_bytes=disk,
    )
    compute = await Compute.start(config, WORKER)
    try:
        yield compute
    finally:
        await compute.close()


def rejection(stop: Stop) -> LocalError:
    """The error for the reason in `stop.rejected` (docs/admission.md)."""
    match stop.rejected:
        case "version":
            return LocalError(
                "HP-RUN-002",
                "the run needs another version of hetpeer",
                why=stop.why,
                fix="use the version of hetpeer that the run was made for",
                exit_code=ExitCode.VERSION,
            )
        case "banned":
            return LocalError(
                "HP-RUN-019",
                "the run is closed to this peer",
                why=stop.why,
                fix="ask the run's author",
                exit_code=ExitCode.RUN_CLOSED,
            )
        case "uninvited":
            return LocalError(
                "HP-RUN-020",
                "the run takes invited or listed peers only",
                why=stop.why,
                fix="ask its author for an invite, and give the whole link to hetpeer join",
                exit_code=ExitCode.RUN_CLOSED,
            )
        case "work":
            return LocalError(
                "HP-RUN-021",
                "the run asks for a proof of work",
                why=stop.why,
                fix="use a newer hetpeer, which does it by itself",
                exit_code=ExitCode.VERSION,
            )
        case "crowded":
            return LocalError(
                "HP-RUN-022",
                "the run takes no more volunteers from this network at the moment",
                why=stop.why,
                fix="try again later",
                exit_code=ExitCode.TRY_LATER,
            )
        case _:
            return LocalError(
                "HP-RUN-010",
                "the run has stopped",
                why=stop.why,
                fix="ask the run's author",
                exit_code=ExitCode.RUN_CLOSED,
            )
