"""`hetpeer join --dry-run`: everything that `join` does before it asks for a place (docs/daemon.md).

It holds the home's lock and has a node in the network meanwhile, but the run's peers do not hear of it. Only
this machine's key and the month's count of bytes remain.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from hetpeer.averaging.effects import Stop
from hetpeer.averaging.member.position import choose_place
from hetpeer.averaging.messages import Place
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.discovery import Advert, Roster
from hetpeer.peer.arrival.find_run import FoundRun
from hetpeer.peer.control.owned_daemon import Notifier, locked
from hetpeer.peer.daemon.leaving import rejection
from hetpeer.peer.daemon.limits_in_force import LimitsInForce
from hetpeer.peer.daemon.owner_wishes import VolunteerDaemon
from hetpeer.peer.daemon.presence import JoinOptions, arriving, refusal
from hetpeer.peer.daemon.worker_start import start_compute
from hetpeer.peer.limits.amounts import blocks_text, bytes_text, size
from hetpeer.peer.limits.governor import paused
from hetpeer.peer.limits.sensors import Sensors
from hetpeer.peer.preparation.disk_room import check_room
from hetpeer.peer.process.console import say
from hetpeer.peer.process.home import Home
from hetpeer.peer.training.early_placement import missing_bytes, places_seen, state_bytes
from hetpeer.peer.training.volunteer_figures import offload_text
from hetpeer.stages.pipeline.place_memory import Offered, choose, room_text


async def try_out(options: JoinOptions) -> None:
    """Say what `hetpeer join` would do.

    Raises the `LocalError` with which `join` would end, and `RemoteError` if the DHT does not answer.
    """
    home = Home(options.home)
    home.identity()
    daemon = VolunteerDaemon(SystemClock(), asyncio.Event(), Notifier(""))
    governing = LimitsInForce(options.settings, daemon, home, Sensors(), options.sources)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(locked(home.path))
        await stack.enter_async_context(governing.running())
        arrival = await stack.enter_async_context(await arriving(options, home, stays=False))
        governing.use(arrival.node.listener.throttle)
        await _foresee(options, home, governing, arrival)
        if reasons := daemon.holding:
            say(f"at the moment it would be {paused(reasons, governing.settings)}")
    say("hetpeer join would take part; this was a trial, and no place was asked for")


async def _foresee(options: JoinOptions, home: Home, governing: LimitsInForce, arrival: FoundRun) -> None:
    """Say what joining would do: admission, proof of work, place, files. Raises what would stop it."""
    signed, node = arrival.signed, arrival.node
    run = RunDirectory(home.path / "runs" / signed.run_id, signed)  # which is made by who joins
    say(
        f"run {signed.manifest.name} ({signed.run_id}): its manifest is valid, and its version fits this "
        "hetpeer"
    )
    if (refused := refusal(run, node.peer_id, options.voucher)) is not None:
        raise rejection(Stop(refused.why, completed=False, rejected=refused.reason))
    if bits := signed.manifest.admission.work_bits:
        say(f"it would first do a proof of work of {bits} bits, unless that is already done")
    async with contextlib.AsyncExitStack() as life:
        _, offer, _ = await start_compute(home, governing, signed.manifest, life)
    adverts = await Roster(node, signed.run_id).read()
    place = choose_place(places_seen(run, adverts, offer), offer.memory)
    for line in _taking(run, place, adverts, offer.memory):
        say(line)
    blocks = range(place.begin, place.end)
    check_room(run.path.parent, run.run_id, missing_bytes(run, blocks), size(governing.settings.limits.files))


def _taking(run: RunDirectory, place: Place, adverts: Mapping[str, Advert], offered: Offered) -> list[str]:
    """Lines about the blocks it would take and the bytes it would download."""
    manifest, blocks = run.manifest, range(place.begin, place.end)
    holders = "1 volunteer" if place.holders == 1 else f"{place.holders or 'no'} volunteers"
    data = sum(shard.bytes for shard in (*manifest.data.train, *manifest.data.heldout))
    needed = f"{bytes_text(missing_bytes(run, blocks))} of graphs and constants"
    states = f"{bytes_text(state_bytes(manifest, blocks))} of states at most"
    choice = choose(place.demand, offered)
    taken = (
        f"{blocks_text(place.begin, place.end)}, held by {holders} now, with "
        f"{room_text(choice.room, apart=offered.apart)}"
    )
    lines = [
        f"it would probably take {taken}; {offload_text(choice.kind, apart=offered.apart)}",
        f"it would download {needed}, {states}, and its part of {bytes_text(data)} of data",
    ]
    if not any(advert.role == "coordinator" for advert in adverts.values()):
        lines.append("no coordinator answers at the moment: it would wait for one")
    return lines
