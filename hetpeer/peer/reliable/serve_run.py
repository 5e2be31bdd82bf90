"""`hetpeer bootstrap DIR`: a node, one life of the reliable peer after another, and the work beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hetpeer.bootstrap.consensus.replica import Replica, run_logs
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.seat_plan import SeatPlan
from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.bootstrap.state.effects import Halt
from hetpeer.bootstrap.state.placement_policies import DEFAULT
from hetpeer.bootstrap.storage.metrics_file import MetricsFile
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.discovery import Roster
from hetpeer.dht.identity.addresses import Address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node
from hetpeer.dht.run_index import RunIndex
from hetpeer.peer.arrival.destinations import Invite
from hetpeer.peer.arrival.invite_file import Inviting
from hetpeer.peer.arrival.rendezvous import join_address, limited, near_address, open_config
from hetpeer.peer.arrival.told_reach import tell_reach_forever
from hetpeer.peer.control.owned_daemon import AttendedDaemon, attended
from hetpeer.peer.limits.setting_layers import DEFAULTS, MergedSettings
from hetpeer.peer.limits.web_address import Where
from hetpeer.peer.probing.coordinate_keeper import keep_moving
from hetpeer.peer.process.lifecycle import freeze_memory, unless
from hetpeer.peer.reliable.disk_wait import DiskWait
from hetpeer.peer.reliable.known_members import KnownMembers
from hetpeer.peer.reliable.line_questions import measure_lines
from hetpeer.peer.reliable.metrics_writer import write_forever
from hetpeer.peer.reliable.plan_proposer import PlanProposer
from hetpeer.peer.reliable.plan_watch import PlanWatch
from hetpeer.peer.reliable.reliable_peer import ReliablePeer
from hetpeer.peer.reliable.reliable_status import (
    ReliableProgress,
    doing,
    figures_of,
    notable_of_reliable,
    reliable_advert,
)
from hetpeer.peer.reliable.stand_in import StandIn
from hetpeer.peer.training.self_advert import anything, publish_forever, take_leave


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapOptions:
    """Options of `hetpeer bootstrap DIR`."""

    directory: Path
    host: str
    port: int
    peers: tuple[Address, ...] = ()
    stand_in: bool = False
    """Whether to compute blocks that no volunteer holds."""
    placement: str = DEFAULT
    """Policy by which places are compared for newcomers (bootstrap/state/placement_policies.py)."""
    plan: SeatPlan | None = None
    """Places for named volunteers; None: as the log has them, or none."""
    keep_places: bool = False
    """Whether volunteers choose and keep their blocks by what they hold alone, however slow that is."""
    dashboard: Where | None = None
    """Address of its dashboard and metrics; None: none."""
    lan: bool = False
    """Whether volunteers of the local network find it there."""
    limits: MergedSettings = DEFAULTS
    """Limits of its line (`peer/limits/node_rates.py`)."""


async def serve_run(
    options: BootstrapOptions, leaving: asyncio.Event, announce: Callable[[str, Invite], None]
) -> Halt | None:
    """Take part in the run's log, and coordinate, until the run is over (its Halt) or `leaving` is set
    (None).

    `announce` gets the address to join at, and the invite, once somebody answers there, and again when
    another address is learned. Raises `LocalError`.
    """
    run = RunDirectory.open(options.directory)
    await asyncio.to_thread(run.verify)
    with run_logs(run) as logs:
        membership_config = MembershipConfig(run.signed, run.path)
        async with attended(run.path, run.identity_path, leaving) as daemon:
            rates = limited(daemon, run.path, options.limits)
            node = await Node.start(
                open_config(options.host, options.port, options.peers), Identity.load(run.identity_path)
            )

            rates.use(node.listener.throttle)

            def announced(invite: Invite) -> None:
                daemon.ready(node.addresses)
                announce(join_address(node), invite)

            disk = DiskWait(run.path)

            async def life() -> Halt | None:
                """Take part from what is on the disk, as after a crash, until the run is over.

                Raises `LocalError` when something could not be saved.
                """
                replica = Replica(node, run, membership_config, logs, SystemClock())
                placement = None if options.keep_places else options.placement
                peer = ReliablePeer(node, run, replica, placement=placement, plan=options.plan, disk=disk)
                daemon.follow(lambda: doing(peer))
                daemon.shows(lambda: figures_of(run, peer), lambda: peer.unsaved)
                async with _web(options, node, run, peer, daemon):
                    return await _take_part(peer, node, run, options, leaving, announced)

            try:
                while not leaving.is_set():
                    try:
                        return await life()
                    except (LocalError, ExceptionGroup) as failure:
                        await unless(leaving.wait(), disk.after(failure))
                return None
            finally:
                await node.close()


def _web(
    options: BootstrapOptions, node: Node, run: RunDirectory, peer: ReliablePeer, daemon: AttendedDaemon
) -> contextlib.AbstractAsyncContextManager[None]:
    """The web server, if one was asked for: nothing of it is loaded otherwise."""
    if options.dashboard is None:
        return contextlib.nullcontext()
    from hetpeer.peer.web.daemon_web import reliable_served

    return reliable_served(options.dashboard, node, run, peer, daemon)


async def _take_part(
    peer: ReliablePeer,
    node: Node,
    run: RunDirectory,
    options: BootstrapOptions,
    leaving: asyncio.Event,
    announce: Callable[[Invite], None],
) -> Halt | None:
    """Run a reliable peer with all that goes beside, until the run is over (its Halt) or `leaving` (None)."""
    freeze_memory()
    roster = Roster(node, run.run_id)

    async def peers_of_the_run() -> Collection[str]:
        return {*await roster.read(), *peer.replica.members}

    node.relay_guard.expected = peers_of_the_run
    work = asyncio.ensure_future(peer.run(leaving))
    left = asyncio.ensure_future(leaving.wait())
    members = KnownMembers(node, run, peer.replica, lambda: peer.service, options.peers)
    beside = list(map(asyncio.ensure_future, _beside(peer, node, run, options, members, roster)))
    try:
        ready = asyncio.ensure_future(peer.ready.wait())
        await asyncio.wait({work, left, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if ready.done():
            inviting = Inviting(node, run, options.peers, lambda: members.invited.addresses)
            if (invite := inviting.renewed()) is not None:
                announce(invite)
            beside += map(asyncio.ensure_future, _inviting(inviting, announce, node, run, options))
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done() and not peer.is_over:
            await peer.replica.leave()
            return None
        halt = await work
        if not halt.completed:
            raise LocalError(
                "HP-RUN-011",
                "the run was halted",
                why=halt.why,
                fix="repair the cause; hetpeer bootstrap then continues at the last committed step",
                exit_code=ExitCode.RUN_CLOSED,
            )
        return halt
    finally:
        tasks = [work, left, *beside]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await take_leave(roster, node, "reliable")


def _beside(
    peer: ReliablePeer,
    node: Node,
    run: RunDirectory,
    options: BootstrapOptions,
    members: KnownMembers,
    roster: Roster,
) -> Iterator[Coroutine[Any, Any, None]]:
    """Work beside the run's log: advert, entry among the DHT's runs, progress, its curve, reachability,
    members, plans, a stand-in.
    """

    def service() -> CoordinatorService | None:
        return peer.service

    yield publish_forever(
        roster,
        lambda: reliable_advert(peer.service, node, peer.coordinate.numbers),
        lambda: notable_of_reliable(peer.service),
        anything,
    )
    yield RunIndex(node).register_forever(run.run_id)
    yield ReliableProgress(peer.replica, service).show_forever()
    yield write_forever(MetricsFile(run, peer.replica.records, SystemClock().wall), peer.ready)
    yield tell_reach_forever(node, reliable=True)
    yield members.call_and_keep(peer.ready)
    yield keep_moving(node, peer.coordinate, run.path, lambda: members.adverts)
    yield PlanWatch(service).watch_forever()
    if not options.keep_places:
        yield PlanProposer(run.manifest, roster, service, partial(measure_lines, node)).look_forever()
    if options.stand_in:
        yield StandIn(run.path / "stand-in", service, lambda: near_address(node)).watch_forever()


def _inviting(
    inviting: Inviting,
    announce: Callable[[Invite], None],
    node: Node,
    run: RunDirectory,
    options: BootstrapOptions,
) -> Iterator[Coroutine[Any, Any, None]]:
    """Work once others may connect: the invite is renewed; the local network is told, if asked for."""
    yield inviting.renew_forever(announce)
    if options.lan:
        from hetpeer.peer.arrival.lan_discovery import announce_forever

        yield announce_forever(node, options.host, run.run_id, run.manifest.name)
