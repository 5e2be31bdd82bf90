"""The reliable peer: its part in the run's log, the files and states that it serves, and the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from hetpeer.averaging.messages import CONTROL_PROTOCOL
from hetpeer.bootstrap.consensus.reconfiguration import Reconfiguration
from hetpeer.bootstrap.consensus.replica import Replica
from hetpeer.bootstrap.log import departure_counts, moves, plan_news
from hetpeer.bootstrap.log.credit_ranking import encode, ranking
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.seat_plan import SeatPlan
from hetpeer.bootstrap.service.core_interface import LeaderStart, is_over
from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.bootstrap.state.context import is_complete
from hetpeer.bootstrap.state.core_config import coordinator_config
from hetpeer.bootstrap.state.effects import Halt
from hetpeer.bootstrap.state.placement_policies import DEFAULT
from hetpeer.bootstrap.storage.file_service import PROTOCOL as FILES
from hetpeer.bootstrap.storage.file_service import Answer, FileService, ServedRunFiles
from hetpeer.bootstrap.storage.replication import CheckpointReplication
from hetpeer.dht.base.errors import HetpeerError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.channels.channel_server import ChannelServer
from hetpeer.dht.node.node import Node
from hetpeer.dht.p2pd.listener import CONTROL as CONTROL_BUDGET
from hetpeer.peer.probing.coordinate_keeper import kept_coordinate
from hetpeer.peer.probing.probe_service import BUDGET as PROBE_BUDGET
from hetpeer.peer.probing.probe_service import PROTOCOL as PROBES
from hetpeer.peer.probing.probe_service import RELIABLE_BYTES, ProbeService
from hetpeer.peer.reliable.checkpoint_catch_up import CheckpointCatchUp
from hetpeer.peer.reliable.disk_wait import DiskWait

LAST = ("checkpoint", "evaluation", "dissolved")
"""Kinds of record that can end a grouped run."""
FOLLOW_S = 0.5
"""Seconds between two looks at the decided records."""


class ReliablePeer:
    """Keeps a replica of the run's log, and coordinates while it leads.

    `placement`: policy by which it then tells newcomers which places serve the run best; None: it does not.
    `plan`: places for named volunteers, in force once this peer coordinates, unless the log has it already.
    """

    def __init__(
        self,
        node: Node,
        run: RunDirectory,
        replica: Replica,
        *,
        placement: str | None = DEFAULT,
        plan: SeatPlan | None = None,
        disk: DiskWait | None = None,
    ) -> None:
        self._node = node
        self._run = run
        self.replica = replica
        self.coordinate = kept_coordinate(node.peer_id, run.path)
        self.disk = disk or DiskWait(run.path)
        """Whether it waits for room on its disk."""
        self._checkpoints = CheckpointReplication(
            node, run, replica.records, replica.company, self._evaluations
        )
        self._shelf = ServedRunFiles(run, replica.membership_config, self._checkpoints.state, self.answers)
        self._placement = placement
        self._plan = plan
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
    def best(self) -> int | None:
        """The version of the checkpoint on our disk with the lowest held-out loss, if any was evaluated."""
        return self._checkpoints.best

    def _evaluations(self) -> Mapping[int, float]:
        """Version → held-out loss, by the log; a grouped run has no versions that all clusters share."""
        return {} if self._run.manifest.averaging is not None else self.replica.history.evaluations

    @property
    def unsaved(self) -> HetpeerError | None:
        """HP-DISK-002 if it cannot start, or save checkpoints, for want of room."""
        errors = [self.disk.error, self._catching_up.uncopied.error]
        if self.service is not None:
            errors.append(self.service.executor.unsaved.error)
        return next((error for error in errors if error is not None and error.code == "HP-DISK-002"), None)

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Answers from the log (credit, moves, departures, plan, curves) for status and dashboards."""
        replica = self.replica
        return {
            "credit": lambda peer: encode(ranking(replica.credit.of, peer)),
            "moves": lambda _: moves.encode(replica.history.moves),
            "departures": lambda _: departure_counts.encode(replica.history),
            "plan": lambda _: plan_news.encode(replica.history),
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
        probes = ProbeService(RELIABLE_BYTES, lambda: self.coordinate.numbers)
        await self._node.serve(PROBES, probes.handle, PROBE_BUDGET)
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
            LeaderStart.of,
            self._run,
            self.replica.records,
            clock.monotonic(),
            placement=self._placement,
            plan=self._plan,
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
