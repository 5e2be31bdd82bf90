"""`hetpeer join`: from an address to a volunteer at work.

In order: listen to the owner, join the network, fetch and check the manifest; then one life after another:
start the compute worker, take part, leave. The parts are undone in reverse order. While the volunteer is held
back there is no worker. A worker that dies (most likely out of memory) is started again a few times.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections import deque
from collections.abc import Sequence

from hetpeer.averaging.effects import Stop
from hetpeer.dht.base.errors import ExitCode
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.peer.control.owned_daemon import TICK_S, Notifier, serving
from hetpeer.peer.daemon.limits_in_force import LimitsInForce
from hetpeer.peer.daemon.owner_wishes import DaemonState, VolunteerDaemon, Wish
from hetpeer.peer.daemon.presence import JoinOptions, Presence, no_state, present
from hetpeer.peer.daemon.volunteer_life import live
from hetpeer.peer.daemon.volunteer_progress import figures_of
from hetpeer.peer.limits.governor import Reason, explained, paused
from hetpeer.peer.limits.kept_options import keep_options
from hetpeer.peer.limits.sensors import Sensors
from hetpeer.peer.limits.setting_layers import MergedSettings
from hetpeer.peer.process.console import say
from hetpeer.peer.process.home import Home
from hetpeer.peer.process.lifecycle import unless
from hetpeer.peer.process.log_files import keeping_log
from hetpeer.peer.training.self_advert import publish_forever, take_leave, workless_advert
from hetpeer.stages.ipc.worker_process import WorkerDiedError

MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0
"""Seconds within which a worker that dies more than MAX_RESTARTS times is not started again."""
SWEEP_S = 0.5
"""Seconds after which nothing of an ended life runs any more."""

_log = logging.getLogger(__name__)


async def join(options: JoinOptions, leaving: asyncio.Event) -> Stop | None:
    """Take part until the run is over (returns its Stop), or `leaving` is set or the owner ends it (None).

    Raises `LocalError`.
    """
    home = Home(options.home)
    home.identity()  # and its folder, where the owner finds us
    daemon = VolunteerDaemon(SystemClock(), leaving, Notifier.of_environment())
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(daemon.running())
        if options.for_s is not None:
            daemon.finish_after(options.for_s)
        governing = LimitsInForce(options.settings, daemon, home, Sensors(), options.sources)
        daemon.explained_by(lambda reasons: explained(reasons, governing.settings))
        await stack.enter_async_context(serving(home.path, governing.answer))
        stack.enter_context(keeping_log(home.path))  # by the process that has the home's lock
        for line in keep_options(home.path, MergedSettings(options.settings, options.sources)):
            say(line)
        await stack.enter_async_context(governing.running())
        ended = daemon.until(Wish.FINISH, Wish.STOP)
        presence = await unless(ended, present(options, home, stack, lambda: governing.settings))
        if presence is None:
            return None
        governing.use(presence.node.listener.throttle)
        await presence.serve_probes(lambda: daemon.wish is Wish.WORK and not governing.metered)
        daemon.joined(presence.node.addresses, lambda: figures_of(presence))
        if options.dashboard is not None:  # nothing of it is loaded otherwise
            from hetpeer.peer.web.daemon_web import volunteer_served

            await stack.enter_async_context(volunteer_served(options.dashboard, presence, daemon, governing))
        stop = await _lives(presence, governing, daemon)
        await take_leave(presence.roster, presence.node, "volunteer")
        if presence.progress.thanks:
            say(presence.progress.thanks)
        return stop


async def _lives(presence: Presence, governing: LimitsInForce, daemon: VolunteerDaemon) -> Stop | None:
    """Live one life of the volunteer after another. Returns the end of the run; None: the owner ends it."""
    deaths: deque[float] = deque(maxlen=MAX_RESTARTS)
    while (wish := daemon.wish) in (Wish.WORK, Wish.PAUSE):
        if wish is Wish.PAUSE:
            await _rest(presence, governing, daemon)
            continue
        try:
            stop = await live(presence, daemon, governing)
        except WorkerDiedError as error:
            if error.status == ExitCode.NO_DEVICE and governing.keep_device():
                continue
            often = len(deaths) == MAX_RESTARTS and time.monotonic() - deaths[0] < RESTART_WINDOW_S
            if often or error.status >= 0:  # one that ended by itself would do so again
                raise
            deaths.append(time.monotonic())
            _log.warning("%s; a new one is started", error.what)
            await unless(daemon.until(Wish.FINISH, Wish.STOP), _clear(presence))
        else:
            if stop is not None:
                return stop
    daemon.stop()
    return None


async def _clear(presence: Presence) -> None:
    """Nothing of the life that is over takes memory while the next one measures how much is free."""
    await presence.serve(no_state)
    await _sweep()


async def _rest(presence: Presence, governing: LimitsInForce, daemon: VolunteerDaemon) -> None:
    """Stay in the network without a worker, for as long as the volunteer is held back."""
    daemon.does(DaemonState.WAITING)
    reasons = daemon.holding
    say(paused(reasons, governing.settings))
    await unless(daemon.until(Wish.WORK, Wish.STOP), _idle(presence, governing, daemon, reasons))
    if daemon.wish is Wish.WORK:
        say("resumed")


async def _idle(
    presence: Presence, governing: LimitsInForce, daemon: VolunteerDaemon, reasons: Sequence[Reason]
) -> None:
    """Be a peer that holds no state; `reasons` have been told. Never returns."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            publish_forever(
                presence.roster,
                lambda: workless_advert(presence.node, governing.settings.node.name, "paused"),
            ),
            name="advert",
        )
        tasks.create_task(presence.mind_sleep(lambda: None), name="sleep")
        tasks.create_task(_sweep(), name="sweep")
        tasks.create_task(_serve_files(presence, governing), name="files")
        tasks.create_task(tell_reasons(governing, daemon, reasons), name="reasons")


async def tell_reasons(governing: LimitsInForce, daemon: VolunteerDaemon, told: Sequence[Reason]) -> None:
    """Say when other reasons hold than were `told`. Never returns."""
    while True:
        await asyncio.sleep(TICK_S)
        if (reasons := daemon.holding) not in (told, ()):
            told = reasons
            say(paused(reasons, governing.settings))


async def _serve_files(presence: Presence, governing: LimitsInForce) -> None:
    """Give others the run's files for as long as the month's cap allows. Never returns."""
    served: bool | None = None
    while True:
        if served is governing.capped or served is None:
            served = not governing.capped
            await (presence.serve(no_state) if served else presence.serve_nothing())
        await asyncio.sleep(TICK_S)


async def _sweep() -> None:
    """Free the memory of the ended life: its objects form cycles, and keep the arena mapped."""
    await asyncio.sleep(SWEEP_S)
    gc.unfreeze()  # `freeze_memory` has excluded it from collection
    gc.collect()
