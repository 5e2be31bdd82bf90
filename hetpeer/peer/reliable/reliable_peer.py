"""The reliable peer: what `hetpeer bootstrap DIR` does. Rendezvous, files and states, and the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from hetpeer.averaging.messages import CONTROL_PROTOCOL
from hetpeer.bootstrap.consensus.reconfiguration import Reconfiguration
from hetpeer.bootstrap.consensus.replica import Replica, run_logs
from hetpeer.bootstrap.log.credit_ranking import encode, ranking
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.service.core_interface import LeaderStart, is_over
from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.bootstrap.state.context import is_complete
from hetpeer.bootstrap.state.core_config import coordinator_config
from hetpeer.bootstrap.state.effects import Halt
from hetpeer.bootstrap.state.placement_policies import DEFAULT
from hetpeer.bootstrap.storage.file_service import PROTOCOL as FILES
from hetpeer.bootstrap.storage.file_service import Answer, FileService, ServedRunFiles
from hetpeer.bootstrap.storage.replication import CheckpointReplication
from hetpeer.dht.base.errors import ExitCode, HetpeerError, LocalError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.channels.channel_server import ChannelServer
from hetpeer.dht.discovery import Roster
from hetpeer.dht.identity.addresses import Address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node
from hetpeer.dht.p2pd.listener import CONTROL as CONTROL_BUDGET
from hetpeer.peer.arrival.destinations import Invite
from hetpeer.peer.arrival.find_run import tell_reach_forever
from hetpeer.peer.arrival.invite_file import Inviting
from hetpeer.peer.arrival.rendezvous import join_address, limited, near_address, open_config
from hetpeer.peer.control.owned_daemon import AttendedDaemon, attended
from hetpeer.peer.limits.settings import DEFAULTS, MergedSettings, Where
from hetpeer.peer.process.lifecycle import freeze_memory, unless
from hetpeer.peer.reliable.checkpoint_catch_up import CheckpointCatchUp
from hetpeer.peer.reliable.disk_wait import DiskWait
from hetpeer.peer.reliable.known_members import KnownMembers
from hetpeer.peer.reliable.plan_proposer import PlanProposer
from hetpeer.peer.reliable.reliable_status import (
    ReliableProgress,
    doing,
    figures_of,
    notable_of_reliable,
    reliable_advert,
)
from hetpeer.peer.reliable.stand_in import StandIn
from hetpeer.peer.training.self_advert import anything, publish_forever, take_leave

LAST = ("checkpoint", "evaluation", "dissolved")
"""Kinds of record that can end a grouped run."""
FOLLOW_S = 0.5
"""Seconds between two looks at the decided records."""


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
    keep_places: bool = False
    """Whether volunteers choose and keep their blocks by what they hold alone, however slow that is."""
    dashboard: Where | None = None
    """Address of its dashboard and metrics; None: none."""
    lan: bool = False
    """Whether volunteers of the local network find it there."""
    limits: MergedSettings = DEFAULTS
    """Limits of its line (`peer/limits/node_rates.py`)."""


class ReliablePeer:
    """Keeps a replica of the run's log, and coordinates while it leads.

    `placement`: policy by which it then tells newcomers which places serve the run best; None: it does not.
    """

    def __init__(
        self,
        node: Node,
        run: RunDirectory,
        replica: Replica,
        *,
        placement: str | None = DEFAULT,
        disk: DiskWait | None = None,
    ) -> None:
        self._node = node
        self._run = run
        self.replica = replica
        self.disk = disk or DiskWait(run.path)
        """Whether it waits for room on its disk."""
        self._checkpoints = CheckpointReplication(node, run, replica.records, replica.company)
        self._shelf = ServedRunFiles(run, replica.membership_config, self._checkpoints.state, self.answers)
        self._placement = placement
        self._looked_at = 0
        """Records that were examined for the end of the run."""
        self._over_before = len(replica.records)
        """Number of records from before this start: halts among them do not end the run again."""
        self._halt: Halt | None = None
        """The last halt, unless a new term has begun since."""
        self._catching_up = CheckpointCatchUp(replica, self._checkpoints)
        self.service: CoordinatorService | None = None
        """Coordinator's service, while this peer leads."""
        self.ready = asyncio.Event()
        """Set once others may connect: volunteers, or the other reliable peers if there are some."""

    @property
    def stored(self) -> int:
        """The version of the newest checkpoint on our disk."""
        return self._checkpoints.newest

    @property
    def unsaved(self) -> HetpeerError | None:
        """HP-DISK-002 if it cannot start, or save checkpoints, for want of room."""
        errors = [self.disk.error, self._catching_up.uncopied.error]
        if self.service is not None:
            errors.append(self.service.unsaved.error)
        return next((error for error in errors if error is not None and error.code == "HP-DISK-002"), None)

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Answers from the log (credit, curves) for status and dashboards."""
        replica = self.replica
        return {
            "credit": lambda peer: encode(ranking(replica.credit.of, peer)),
            "curves": lambda _: replica.curves.curves.encode(),
        }

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, and only its end is told any more."""
        return self.service is not None and self.service.halted.done()

    async def run(self, leaving: asyncio.Event) -> Halt:
        """Wait for room on the disk, then run until the run is over, and then until `leaving`.

        Raises `LocalError` on failed writes.
        """
        await self.disk.until_room()
        await self._checkpoints.serve()
        refusing = ChannelServer(lambda _peer, _key: None, 0)
        await self._node.serve(CONTROL_PROTOCOL, refusing.handle, CONTROL_BUDGET)
        self._node.listener.reliable = self.replica.company
        await self._node.serve(FILES, FileService(self._shelf, self._node.listener.knows).handle)
        if len(self.replica.members) > 1:
            self.ready.set()
        works = {
            asyncio.ensure_future(work)
            for work in (
                self.replica.run(),
                Reconfiguration(self._node, self.replica, lambda: self._checkpoints.newest).run(),
                self._catching_up.look_forever(),
            )
        }
        duty = asyncio.ensure_future(self._lead_or_follow(leaving))
        try:
            done, _ = await asyncio.wait({*works, duty}, return_when=asyncio.FIRST_COMPLETED)
            for work in done & works:
                work.result()
            return duty.result()
        finally:
            for task in (*works, duty):
                task.cancel()
            await asyncio.gather(*works, duty, return_exceptions=True)

    async def _lead_or_follow(self, leaving: asyncio.Event) -> Halt:
        """Follow or lead, in turn, until the run is over. Returns its end."""
        while True:
            following = asyncio.ensure_future(self._follow())
            leading = asyncio.ensure_future(self.replica.leading())
            try:
                await asyncio.wait({following, leading}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    return following.result()
            finally:
                for task in (following, leading):
                    task.cancel()
                await asyncio.gather(following, leading, return_exceptions=True)
            halt = await self._lead(leaving)
            if halt is not None:
                return halt

    async def _lead(self, leaving: asyncio.Event) -> Halt | None:
        """Serve as the coordinator for one term. Returns the end of the run; None if another leads."""
        # A checkpoint may have been decided since we last looked, and a roll-back would ask us for it.
        await self._catching_up.look()
        clock = SystemClock()
        begun = await asyncio.to_thread(
            LeaderStart.of, self._run, self.replica.records, clock.monotonic(), placement=self._placement
        )
        self.service = CoordinatorService(
            self._node, self._run, self.replica, self._checkpoints, clock, begun
        )
        serving = asyncio.ensure_future(self.service.serving.wait())
        serving.add_done_callback(lambda _: self.ready.set())
        try:
            return await self.service.run(leaving)
        finally:
            serving.cancel()
            self.service = None

    async def _follow(self) -> Halt:
        """Return when the run is over."""
        while True:
            if (over := await self._outcome()) is not None:
                return over
            await asyncio.sleep(FOLLOW_S)

    async def _outcome(self) -> Halt | None:
        """End of the run by the log, or None. Halts of an earlier life or of an earlier term do not count."""
        if len(self.replica.records) > self._looked_at and await self._is_over():
            return Halt(f"all {coordinator_config(self._run).steps} steps are committed", completed=True)
        return self._halt if self.replica.is_current else None

    async def _is_over(self) -> bool:
        """Whether all steps are done, by the records since the last call; notes halts among them."""
        records, config = self.replica.records, coordinator_config(self._run)
        new = records[max(self._looked_at, self._over_before) :]
        before, self._looked_at = self._looked_at, len(records)
        for record in new:
            if record["kind"] == "halt":
                self._halt = Halt(record["why"], completed=False)
            elif record["kind"] == "reign":
                self._halt = None
        averaging = self._run.manifest.averaging
        if averaging is None:
            return is_complete(config, self.replica.history)
        if before == 0 or any(record["kind"] in LAST for record in new):
            # all of the log is looked at, and leader and followers wait for nobody who is silent for seconds
            return await asyncio.to_thread(is_over, config, averaging, records)
        return False


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
                peer = ReliablePeer(node, run, replica, placement=placement, disk=disk)
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
    """Run a reliable peer with all that goes beside: adverts, progress, plans, stand-in, invites."""
    freeze_memory()
    roster = Roster(node, run.run_id)

    async def peers_of_the_run() -> Collection[str]:
        return {*await roster.read(), *peer.replica.members}

    node.relay_guard.expected = peers_of_the_run
    work = asyncio.ensure_future(peer.run(leaving))
    left = asyncio.ensure_future(leaving.wait())
    members = KnownMembers(node, run, peer.replica, lambda: peer.service, options.peers)
    beside = [
        asyncio.ensure_future(
            publish_forever(
                roster,
                lambda: reliable_advert(peer.service, node),
                lambda: notable_of_reliable(peer.service),
                anything,
            )
        ),
        asyncio.ensure_future(ReliableProgress(peer.replica, lambda: peer.service).show_forever()),
        asyncio.ensure_future(tell_reach_forever(node, reliable=True)),
        asyncio.ensure_future(members.call_and_keep(peer.ready)),
    ]
    if not options.keep_places:
        beside.append(
            asyncio.ensure_future(PlanProposer(run.manifest, roster, lambda: peer.service).look_forever())
        )
    if options.stand_in:
        helper = StandIn(run.path / "stand-in", lambda: peer.service, lambda: near_address(node))
        beside.append(asyncio.ensure_future(helper.watch_forever()))
    try:
        ready = asyncio.ensure_future(peer.ready.wait())
        await asyncio.wait({work, left, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if ready.done():
            inviting = Inviting(node, run, options.peers, lambda: members.invited.addresses)
            if (invite := inviting.renewed()) is not None:
                announce(invite)
            beside.append(asyncio.ensure_future(inviting.renew_forever(announce)))
            if options.lan:
                from hetpeer.peer.arrival.lan_discovery import announce_forever

                told = announce_forever(node, options.host, run.run_id, run.manifest.name)
                beside.append(asyncio.ensure_future(told))
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
