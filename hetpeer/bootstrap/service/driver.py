"""The coordinator's driver: it connects the core to real channels, the real clock and the disk.

Volunteers' sessions come in, their messages go to the core, and time passes for it. effect_executor.py
carries out what the core answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import CONTROL_PROTOCOL
from hetpeer.bootstrap.consensus.replica import DeposedError, Replica
from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.grouped.formation import Formation
from hetpeer.bootstrap.grouped.grouped_run import GroupedRun
from hetpeer.bootstrap.grouped.recut import Recut
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.service.alarm import Alarm
from hetpeer.bootstrap.service.core_interface import LeaderStart
from hetpeer.bootstrap.service.effect_executor import EffectExecutor
from hetpeer.bootstrap.service.evidence_keeper import EvidenceKeeper
from hetpeer.bootstrap.service.sessions import VolunteerSessions, briefly
from hetpeer.bootstrap.state import effects as d
from hetpeer.bootstrap.state.core_config import message_bounds
from hetpeer.bootstrap.state.timeouts import MAX_TICK_S
from hetpeer.bootstrap.storage.replication import CheckpointReplication
from hetpeer.dht.base.errors import ProtocolError, short_id
from hetpeer.dht.base.runtime import Clock, heed_cancellation
from hetpeer.dht.channels.channel import Channel
from hetpeer.dht.identity.addresses import network_in
from hetpeer.dht.node.node import Node
from hetpeer.dht.p2pd.listener import CONTROL as CONTROL_BUDGET

TICK_S = 0.2
LINGER_S = 3.0

_log = logging.getLogger(__name__)


class CoordinatorService:
    """One term over `run` at the peer that leads the log, from `begun`; `run` returns the Halt, or None."""

    def __init__(
        self,
        node: Node,
        run: RunDirectory,
        replica: Replica,
        checkpoints: CheckpointReplication,
        clock: Clock,
        begun: LeaderStart,
    ) -> None:
        self._node = node
        self._run = run
        self._replica = replica
        self._clock = clock
        self.core, self._admission = begun.core, begun.admission
        self._evidence = EvidenceKeeper(begun.logs)
        self._networks: dict[str, str] = {}
        """Volunteer → the network it came from: its stream may be down when another volunteer comes."""
        self._sessions = VolunteerSessions(self, clock, message_bounds(run.manifest))
        self._alarm = Alarm(clock, lambda: self._hear(self.core.tick))
        """Rings when the core is due before the next regular tick."""
        self.halted: asyncio.Future[d.Halt] = asyncio.get_running_loop().create_future()
        self.executor = EffectExecutor(
            node, run, replica, checkpoints, begun, self._sessions, self._hear, self.halted
        )
        self._amend()
        self.serving = asyncio.Event()
        """Set once volunteers are answered."""

    # ── running ─────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self, leaving: asyncio.Event) -> d.Halt | None:
        """Serve until the run is over, or another peer leads (None).

        After the run's end it answers for LINGER_S or until `leaving`, so that volunteers hear how it ended.
        Cancelled, it stops between two effects, which is as safe as a crash.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                works = [
                    tasks.create_task(self.executor.run(tasks)),
                    tasks.create_task(self._until_deposed()),
                ]
                works.append(tasks.create_task(self._evidence.run()))
                self._queue(self.core.start())
                await self._node.serve(CONTROL_PROTOCOL, self._sessions.handle, CONTROL_BUDGET)
                self.serving.set()
                works.append(tasks.create_task(self._tick()))
                halt = await self.halted
                await asyncio.gather(*(briefly(channel.drained()) for channel in self._sessions))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        await leaving.wait()
                await briefly(self._evidence.idle())
                self.executor.stop()
                for task in works:
                    task.cancel()
                return halt
        except* DeposedError:
            _log.warning("another reliable peer leads the run now")
        finally:
            self._alarm.stop()
            self._sessions.close()
        heed_cancellation()
        return None

    async def _until_deposed(self) -> None:
        await self._replica.deposed()
        raise DeposedError

    async def _tick(self) -> None:
        """Pass the time to the core every TICK_S, look after sessions, and pass on amendments."""
        ticked, cut = self._clock.monotonic(), False
        while True:
            await asyncio.sleep(TICK_S)
            last, ticked = ticked, self._clock.monotonic()
            cut, before = self._sessions.all_broken, cut
            if not self._node.is_up or (cut and not before):
                self.core.renewed(ticked)
            if cut and not before:
                self._node.call_others()
            if ticked - last > MAX_TICK_S:
                _log.warning("this process stood still for %.1f s: no lease runs out for that", ticked - last)
            self._queue(self.core.tick(ticked))
            if self._sessions.look(ticked):
                for peer in self._evidence.to_ask():
                    self._tasks.create_task(self._ask_for_events(peer, again=True))
            if self._amended != self._replica.membership_config.data:
                self._amend()
                for channel in self._sessions:
                    self._tell_amendment(channel)

    def _queue(self, effects: Sequence[d.Effect]) -> None:
        """Queue what an event has led to; it may also have changed when the core is due."""
        self.executor.put(effects)
        self._alarm.set(self.core.due_at)

    # ── volunteers ──────────────────────────────────────────────────────────────────────────────────────────

    async def evidence(self, peer: str, line: str) -> None:
        """Queue a line of `peer`, if it is admitted; return when it may send the next.

        Raises `ProtocolError`.
        """
        if peer in self._sessions.inside:
            await self._evidence.put(peer, line)
            self._hear(partial(self.core.receive, peer, m.Heartbeat()))  # all that the core needs of it

    def received(self, peer: str, message: m.Message) -> None:
        """Pass a message on to the core, if `peer` is admitted."""
        if isinstance(message, m.Hello):
            if not self._lets_in(peer, message):
                return
            if peer in self._sessions.inside:
                self._tasks.create_task(self._ask_for_events(peer, again=False))
        elif peer not in self._sessions.inside:
            return
        self._hear(partial(self.core.receive, peer, message))

    def _hear(self, happens: Callable[[float], Sequence[d.Effect]]) -> None:
        """Pass an event of a volunteer on to the core. A core that fails on it ends the term.

        Raises `ProtocolError` for what no honest peer sends; the core has changed nothing then.
        """
        try:
            self._queue(happens(self._clock.monotonic()))
        except ProtocolError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the process ends with it
            self._break_off(error)

    def _break_off(self, error: Exception) -> None:
        self._alarm.stop()
        self._sessions.close()
        if not self.halted.done():
            self.halted.set_exception(error)

    def _lets_in(self, peer: str, hello: m.Hello) -> bool:
        """Whether to pass `hello` on to the core; otherwise `peer` is turned away."""
        if not hello.understands_us or hello.run != self._run.run_id:
            return True  # the core answers what is wrong with it
        inside, network = self._sessions.inside, self._network(peer)
        self._networks = {other: where for other, where in self._networks.items() if other in inside}
        others = [where for other, where in self._networks.items() if other != peer]
        verdict = self._admission.judge(peer, hello, self._clock.wall(), network, others)
        if isinstance(verdict, m.Rejected):
            self._turn_away(peer, verdict)
            return False
        inside.add(peer)
        self._networks[peer] = network
        if verdict.record is not None:
            self._queue([d.Record(verdict.record)])
        return True

    def _turn_away(self, peer: str, why: m.Rejected) -> None:
        """Turn `peer` away with a reason; it leaves if it takes part."""
        _log.info("%s is turned away: %s", short_id(peer), why.why)
        self._queue([d.Send(peer, why)])
        if peer in self._sessions.inside:
            self._hear(partial(self.core.receive, peer, m.Farewell()))
            self._sessions.inside.discard(peer)
        self._queue([d.Disconnect(peer)])

    def _network(self, peer: str) -> str:
        """The network of `peer`; empty if it is not connected."""
        channel = self._sessions.channel(peer)
        return network_in(channel.address) if channel is not None and channel.is_up else ""

    def _amend(self) -> None:
        """Put the newest amendment into effect, and turn away volunteers that it bans."""
        membership_config = self._replica.membership_config
        self._amended = membership_config.data
        """The amendment that all volunteers were told of."""
        if membership_config.amendment is not None:
            self._admission.amended(membership_config.amendment)
        for peer in [peer for peer in self._sessions.inside if self._admission.bans(peer)]:
            self._turn_away(peer, m.Rejected(reason="banned", why="the run's author has banned this peer"))

    def arrange(self, arrangement: Arrangement) -> None:
        """Pass a planner's proposal for all places on to the core."""
        if isinstance(self.core, Coordinator):
            self._queue(self.core.arrange(arrangement, self._clock.monotonic()))

    def form(self, formation: Formation) -> None:
        """Pass a planner's clusters for those that wait on to the core."""
        if isinstance(self.core, GroupedRun):
            self._queue(self.core.form(formation, self._clock.monotonic()))

    def expect(self, peers: Collection[str]) -> None:
        """Tell the core which volunteers are on their way."""
        if isinstance(self.core, GroupedRun):
            self.core.expect(peers)

    def recut(self, recut: Recut) -> None:
        """Pass a planner's new division of living clusters on to the core."""
        if isinstance(self.core, GroupedRun):
            self._queue(self.core.recut(recut, self._clock.monotonic()))

    def broken(self, peer: str) -> None:
        """The stream of `peer` broke."""
        self._hear(partial(self.core.broken, peer))

    def resumed(self, peer: str) -> None:
        """The stream of `peer` is back."""
        self._hear(partial(self.core.resumed, peer))

    async def _ask_for_events(self, peer: str, *, again: bool) -> None:
        """Ask the volunteer for lines that are not here, at the beginning of a session or `again` within it.

        Another reliable peer may have coordinated until now, or this one's disk was full.
        """
        channel = self._sessions.channel(peer)
        last = await self._evidence.last(peer, again=again)  # it sends none until it is asked
        if channel is not None:
            self._sessions.tell(channel, m.Kept(last=last))
            self._tell_amendment(channel)

    def _tell_amendment(self, channel: Channel) -> None:
        if data := self._replica.membership_config.data:
            self._sessions.tell(channel, m.Amended(amendment=data))

    # ── what others see of it ───────────────────────────────────────────────────────────────────────────────

    @property
    def blocks(self) -> int:
        """Blocks of the model."""
        return len(self._run.manifest.blocks)

    def tokens_per_second(self) -> float:
        """Tokens per second of the last committed step, or of those of all clusters; 0 before the first."""
        manifest = self._run.manifest
        tokens = manifest.training.batch_size * manifest.data.tokens_per_sample
        return sum(float(tokens / commit["seconds"]) for commit in self.core.last if commit.get("seconds"))
