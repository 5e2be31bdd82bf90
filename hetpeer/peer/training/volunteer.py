"""A volunteer at work: the member core driven by real channels, the compute worker and the disk.

Events from the network and the worker go into the core. Its effects are carried out in order, by one queue
(step_driver.py): those of a step there, the others here. All of it runs on one loop, so nothing here needs a
lock. One `Volunteer` lives as long as its compute workers: when one dies, everything it held is lost, and a
new one with a new incarnation begins (join_run.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import Effect
from hetpeer.averaging.member.member import Member
from hetpeer.averaging.member.member_life import Phase
from hetpeer.averaging.member.position import Origin, choose_place
from hetpeer.averaging.member.step_vote import ModelShape
from hetpeer.averaging.member.tensor_heads import ActivationHead
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.dht.base import failpoints
from hetpeer.dht.base.errors import LocalError, short_id
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.discovery import TaskBoard
from hetpeer.dht.node.node import Node
from hetpeer.peer.preparation.rehearsed_speed import speed_on
from hetpeer.peer.preparation.state_fetcher import RunFiles, StateFetcher
from hetpeer.peer.process.home import Home
from hetpeer.peer.process.span_trace import Trace
from hetpeer.peer.training.control_session import ControlSession
from hetpeer.peer.training.evidence_log import EvidenceLog
from hetpeer.peer.training.held_states import HeldStates
from hetpeer.peer.training.place_loading import PlaceLoading
from hetpeer.peer.training.state_loading import StateLoading
from hetpeer.peer.training.step_driver import StepDriver
from hetpeer.peer.training.step_entry import LeftoverWatch, StepEntry
from hetpeer.peer.training.task_execution import HeldPlace
from hetpeer.peer.training.volunteer_figures import Credentials, Offer, VolunteerFigures
from hetpeer.peer.transport.data_plane import DataPlane
from hetpeer.peer.transport.link_book import LinkBook
from hetpeer.peer.transport.spill_file import SpillFile
from hetpeer.peer.transport.tensor_schema import TensorSchema
from hetpeer.peer.transport.tensor_store import TensorStore
from hetpeer.peer.transport.worker_posts import WorkerPosts
from hetpeer.stages.ipc.compute import Compute
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.place_memory import Choice
from hetpeer.stages.pipeline.schedule_1f1b import InFlightWindow

LAST_WORD_S = 1.0

_log = logging.getLogger(__name__)


class Volunteer:
    """One life of a volunteer of one run. `run` returns when the run is over."""

    def __init__(
        self,
        node: Node,
        home: Home,
        files: RunFiles,
        compute: Compute,
        offer: Offer,
        credentials: Credentials,
        evidence: EvidenceLog,
        trace: Trace,
        coordinate: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        """`coordinate`: where we are in the network, as adverts say it."""
        self._node = node
        self._home = home
        self._files = files
        self._compute = compute
        self._evidence = evidence
        self._coordinate = coordinate
        self._trace = trace
        self._begun: dict[int, float] = {}
        """Step → when it began here, for the trace; a step may begin while the one before is applied."""
        self._manifest = files.run.manifest
        self.offer = offer
        self.figures = VolunteerFigures()
        hello = m.Hello(
            run=files.run.run_id,
            oldest_version=m.OLDEST_VERSION,
            incarnation=home.next_incarnation(),
            name=offer.name,
            **offer.hello_fields(),
            flops_per_second=offer.flops_per_second,
            product_flops=offer.flops_per_second,
            uplink=offer.uplink,
            downlink=offer.downlink,
            voucher=credentials.voucher,
            work=credentials.work,
        )
        self._window = InFlightWindow()
        self.member = Member(node.peer_id, hello, _shape_of(self._manifest), self._window)
        self.session = ControlSession(
            node,
            files.membership_config,
            lambda: self.perform(self.member.connected(self.links.reducing.rate, coordinate())),
            self._received,
            evidence.after,
            files.look_for_amendment,
        )
        self._tasks = TaskSet(self._fail)
        self._spawn: Callable[[Coroutine[Any, Any, None]], object] = partial(
            self._tasks.spawn, name="volunteer's work"
        )
        self._store = TensorStore(compute.arena, SpillFile(home.path, compute.exchange.share))
        self.links = LinkBook(self._manifest.links, offer.uplink)
        self._plane = DataPlane(node, str(hello.incarnation), self._tasks, self.links, trace, self)
        self._steps = StepDriver(
            self.member,
            self._plane,
            self._store,
            self.figures,
            self._spawn,
            self._carry_out,
            trace,
            self.rejoin,
        )
        self._states = HeldStates(self.member, self._steps.changed)
        self.state = self._states.find
        self.perform: Callable[[Iterable[Effect]], None] = self._steps.perform
        self.tensor_arrived, self.unread = self._steps.arrived, self._steps.unread
        self._entry = StepEntry(
            self.member,
            self._plane,
            files.run.run_id,
            files.membership_config,
            evidence,
            self.perform,
            self.session.give_evidence,
        )
        self.introduced = self._entry.introduced
        self._place = PlaceLoading(files, compute, offer, self._store, self._window, self._tasks)
        self._preparing: asyncio.Task[Any] | None = None
        self._loading = StateLoading(self.member, self._tasks, self._fetcher, self.perform)
        self._over: asyncio.Future[e.Stop] = asyncio.get_running_loop().create_future()

    # ── life ────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> e.Stop:
        """Take part until the run ends. Raises `LocalError` (no place fits, disk full), `WorkerDiedError`."""
        try:
            await self._plane.start()
            self._tasks.spawn(
                self.session.run(lambda: self.member.life.hello.incarnation), name="control session"
            )
            self._tasks.spawn(self._watch_worker(), name="compute worker")
            board = TaskBoard(self._node, self._files.run.run_id)
            ids = self._manifest.training.ids
            watch = LeftoverWatch(self._node.peer_id, board, self.member.work, self._entry, ids)
            self._tasks.spawn(watch.watch_forever(), name="task board")
            return await self._over
        except LocalError:
            # Nothing of what we held is left: the coordinator need not wait whether we come back.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await self.session.farewell()
            raise
        finally:
            self._steps.close()
            self.session.close()
            self._plane.close()
            self._place.close()
            await self._tasks.close()
            self._store.close()

    @property
    def offload(self) -> Choice | None:
        """Kind of offload of the place, and its room; None before there is a place."""
        return self._place.offload

    @property
    def admitted(self) -> bool:
        """Whether a coordinator has given us a place."""
        return self.member.phase is not Phase.JOINING

    @property
    def tokens_per_second(self) -> float:
        """Tokens (or samples) run forward and backward here lately."""
        per_microbatch = self._manifest.training.microbatch_size * self._manifest.data.tokens_per_sample
        return self.figures.speed.at(time.monotonic()) * per_microbatch

    async def step_over(self) -> None:
        """Return when the oldest step in progress now is over: committed and applied here, or given up."""
        step = self.member.work.step
        while step is not None and self.member.work.works_on(step):
            await self.happens()

    @property
    def trouble(self) -> LocalError | None:
        """Error of the disk because of which lines of our event log are in memory only."""
        return self._evidence.trouble

    async def out_of_room(self) -> None:
        """Return once there is `trouble`."""
        while self.trouble is None:
            await self.happens()

    async def happens(self) -> None:
        """Return when something has happened here."""
        self._steps.changed.clear()
        await self._steps.changed.wait()

    def rejoin(self) -> None:
        """Go on under a new incarnation: others have given this one up, or soon will."""
        self._spawn(self._rejoin())

    async def _watch_worker(self) -> None:
        raise await self._compute.died()

    def _fail(self, error: BaseException) -> None:
        """A task failed by no peer's fault: this life is over."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not self._over.done():
            self._over.set_exception(error)

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────

    def _received(self, message: m.Message) -> None:
        """Take a message of the coordinator: what concerns links and files first, then the core."""
        if isinstance(message, m.Joined):
            self._entry.joined(message)
        if isinstance(message, m.Gone):
            self._entry.left(message)
        if isinstance(message, m.Begin):
            self._entry.begun(message)
            self._files.volunteers = tuple(message.roster)
            if not message.delayed:  # else steps go on beside it as they began
                self.links.target = message.target
                self._begun[message.step] = self._trace.now()
        self._steps.received(message)

    def nudged(self, peer: str, head: ActivationHead) -> None:
        """Answer an activation that `peer` sends again; only its head has come, the bundle waits for a grant.

        If its task is known here, kept tensors are sent again, and a newer attempt is passed on.
        """
        origin = Origin(peer, head.incarnation, head.step_id)
        self.perform(self.member.work.nudge(origin, head.id, head.route, head.attempt))

    def link_changed(self, peer: str, is_up: bool) -> None:
        """Our link to `peer` is down, or up again."""
        if is_up:
            self.member.work.reachable(peer)
        else:
            _log.info("lost the link to %s", short_id(peer))
            self.perform(self.member.work.unreachable(peer))

    def link_congested(self, peer: str, blocks: int | None) -> None:
        """Our link to `peer` takes no forwards with `blocks` or more left to the loss; None: it takes all."""
        self.perform(self.member.work.congested(peer, blocks))

    def refused(self, peer: str, for_now: bool) -> None:
        """`peer` has offended too often and is shunned `for_now`, or is accepted again."""
        self.perform(self.member.work.refused(peer, for_now))

    # ── effects ─────────────────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, effect: Effect) -> None:
        """Carry out an effect that belongs to no step."""
        if isinstance(effect, e.Tell):
            if failpoints.armed:
                failpoints.reached(f"tell_{effect.message.kind}")
            self.session.tell(effect.message)
            return
        if failpoints.armed:
            failpoints.before(effect)
        match effect:
            case e.Choose(places):
                self.perform(self.member.life.chosen(choose_place(places, self.offer.memory)))
            case e.Prepare(begin, end):
                self._preparing = self._instead(self._preparing, self._prepare(begin, end))
            case e.FetchState():
                self._loading.begin(effect)
            case e.SaveState():
                for copying in self._states.snapshot(effect):
                    self._spawn(copying)
            case e.RecordApplied():
                bundles = self._steps.coded_bundles(effect.step)
                for line in self._evidence.applied(
                    effect, self.member.life.hello.incarnation, self.offer.arithmetic, bundles
                ):
                    self.session.give_evidence(line)
                number = effect.step.number
                self.figures.updated(number, time.monotonic())
                self._trace.span("step", f"step {number}", self._begun.pop(number, self._trace.now()))
                if not effect.step.group:  # an averaging is nobody's work
                    self.figures.credited += self._credited(effect.covers)
                    self.session.tell(self.links.paced(self._coordinate()))
            case e.EndStep(step):
                self._steps.end(step)
            case e.Leave(why):
                if not self.session.leaving:  # else a message of ours came after our farewell
                    _log.warning("fenced by the coordinator: %s", why)
                    self.rejoin()
            case e.Stop():
                if not self._over.done():
                    self._over.set_result(effect)
            case p.Release(handle):
                self._steps.release(handle)

    def _credited(self, covers: Sequence[m.Cover]) -> int:
        """Samples x blocks of ours in a commit."""
        slots = (ids for cover in covers for holder, ids in cover.slots if holder == self._node.peer_id)
        return sum(self._manifest.training.samples_of(number) for ids in slots for number in ids)

    def _instead(self, old: asyncio.Task[Any] | None, work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        """Run `work`; what `old` did for an earlier order is not wanted any more."""
        if old is not None:
            old.cancel()
        return self._tasks.spawn(work, name="volunteer's preparation")

    # ── joining ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _prepare(self, begin: int, end: int) -> None:
        """Load the place, and be ready to fetch its state and to train."""
        self.links.begin_anew()
        self._steps.use(None)
        self._states.use(None, {})
        self._loading.give_up()
        specs = await self._place.load(begin, end)
        posts, source = WorkerPosts(self._compute, self._store, self._trace), self._place.source
        self._steps.use(
            HeldPlace(
                self._node.peer_id,
                self.member,
                posts,
                TensorSchema(specs, self._manifest),
                self.links,
                self._window,
                source,
                self._tasks,
                self.perform,
                self._plane.offended,
            )
        )
        self._states.use(posts, self._place.state_bytes)
        self._loading.use(specs, source)
        speed = await speed_on(self._compute, specs, self.offer.flops_per_second)
        self.perform(self.member.life.prepared(speed))

    def _fetcher(self) -> StateFetcher:
        """A fetcher that asks today's reliable peers."""
        kept = len(self._manifest.optimizer_state)
        reliable = self._files.membership_config.peers
        return StateFetcher(self._node, self._compute, reliable, kept, self._states)

    async def _rejoin(self) -> None:
        """The state is fetched again."""
        incarnation = await asyncio.to_thread(self._home.next_incarnation)
        self.perform(self.member.reborn(incarnation))
        self.session.renew()


def _shape_of(manifest: Manifest) -> ModelShape:
    """Sizes of the model for a volunteer's core, and which versions overlapping steps are computed with."""
    training = manifest.training
    return ModelShape(
        sizes={block.index: block.vector_count for block in manifest.blocks},
        slot_capacity=training.slot_size,
        ties=Ties(manifest.ties),
        delays=manifest.delays,
        sparse=manifest.links.sparse,
    )
