"""One life of a volunteer: from the start of its compute worker to its end, as the owner wishes.

An early end begins with the suspension of the worker: from then on it takes no processor time, and other
volunteers compute its unfinished work again (docs/daemon.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from typing import Any

from hetpeer.averaging.effects import Stop
from hetpeer.averaging.member.member_life import Phase
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.peer.control.owned_daemon import Does
from hetpeer.peer.daemon.leaving import HAND_OVER_S, called_off, rejection, say_farewell
from hetpeer.peer.daemon.limits_in_force import LimitsInForce
from hetpeer.peer.daemon.measured_line import keep_traffic, measured_line
from hetpeer.peer.daemon.owner_wishes import DaemonState, VolunteerDaemon, Wish
from hetpeer.peer.daemon.presence import Presence
from hetpeer.peer.daemon.worker_start import pace_forever, start_compute, with_line
from hetpeer.peer.probing.coordinate_keeper import direct_trips, keep_moving
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
from hetpeer.stages.ipc.compute import Compute

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
    daemon.follow(lambda: doing(member.phase, in_touch=volunteer.session.is_up, spared=member.life.is_spared))
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
    asked = asyncio.ensure_future(called_off(volunteer, daemon))
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
