"""A volunteer at work: the member core driven by real channels, the compute worker and the disk.

Events from the network and the worker go into the core; its effects are carried out in order. All of it runs on one
loop, so nothing here needs a lock. Ends when the run is over, or with the error that makes going on impossible.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.heads import ActivationHead, GradientHead, Head, ShardHead
from hetpeer.averaging.member import Effect, InStep, Member, Origin, Phase, StepEffect
from hetpeer.averaging.places import choose_place
from hetpeer.bootstrap.eventlog import EventLog
from hetpeer.bootstrap.service import CONTROL
from hetpeer.bootstrap.serving import Served
from hetpeer.dht.channel import Channel, Parcel, dial
from hetpeer.dht.errors import ExitCode, LocalError, PeerLostError, RemoteError
from hetpeer.dht.node import Node
from hetpeer.dht.streams import Stream
from hetpeer.peer.dataplane import DataPlane
from hetpeer.peer.execution import DataSource, Execution
from hetpeer.peer.home import Home
from hetpeer.peer.preparing import RunFiles, StateFetcher, prepare_block
from hetpeer.peer.tensors import Tensor, TensorStore
from hetpeer.stages.execution import commands as c
from hetpeer.stages.execution import effects as p
from hetpeer.stages.execution.compute import Compute
from hetpeer.stages.execution.results import CommandFailedError
from hetpeer.stages.execution.slots import Drop, Merge

STATE_WAIT_S = 20.0
"""A holder that still applies an update keeps whoever asks for the new state waiting so long at most."""
PREPARE_RETRY_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What this machine brings."""

    memory_bytes: int
    flops_per_second: float
    name: str = ""


@dataclass(slots=True)
class Figures:
    """What the volunteer did so far, for its own progress line and its advert."""

    microbatches: int = 0
    """Block ranges run forward and backward here."""
    steps: int = 0
    tokens_per_second: float = 0.0


class Volunteer:
    """One volunteer of one run. `run` returns when the run is over."""

    def __init__(self, node: Node, home: Home, files: RunFiles, compute: Compute, offer: Offer) -> None:
        self._node = node
        self._home = home
        self._files = files
        self._compute = compute
        self.offer = offer
        self._manifest = files.run.manifest
        self._coordinator = self._manifest.coordinators[0]
        self._store = TensorStore(compute.arena)
        self._events = EventLog(home.events_path(files.run), home.identity())
        self._execution: Execution | None = None
        self._dump_rooms: dict[int, int] = {}
        self._snapshots: dict[tuple[int, int], tuple[bytes, str]] = {}
        self._control: Channel | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._leaving = False
        self._changed = asyncio.Event()
        self._over: asyncio.Future[e.Stop] = asyncio.get_running_loop().create_future()
        self.figures = Figures()
        hello = m.Hello(
            run=files.run.run_id,
            incarnation=home.next_incarnation(),
            name=offer.name,
            memory_bytes=offer.memory_bytes,
            flops_per_second=offer.flops_per_second,
        )
        sizes = {block.index: block.parameter_count for block in self._manifest.blocks}
        self.member = Member(node.peer_id, hello, sizes, self._manifest.training.slot_size)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> e.Stop:
        """Take part until the run is over. Raises `LocalError` (nothing fits, disk full, worker died)."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                key = str(self.member.incarnation)
                self._plane = DataPlane(self._node, key, tasks, self._tensor_arrived, self._link_changed)
                await self._plane.start()
                dialling = tasks.create_task(self._keep_dialling())
                watching = tasks.create_task(self._watch_worker())
                stop = await self._over
                for task in (dialling, watching, self._fetching):
                    if task is not None:
                        task.cancel()
                self._plane.close()
                return stop
        finally:
            self._events.close()

    async def farewell(self) -> None:
        """Say that we leave; returns when the coordinator knows it. To be given a dead-line by the caller."""
        self._leaving = True
        if self._control is not None:
            self._control.send(Parcel({}, (m.encode(m.Farewell()),)))
            await self._control.drained()

    async def _keep_dialling(self) -> None:
        """One control session after another, for as long as we take part."""
        session = 0
        while not self._leaving:
            session += 1
            key = f"{self.member.incarnation}.{session}"
            self._control = Channel(self._coordinator, key, self, payload_limit=m.MAX_MESSAGE_BYTES)
            self.perform(self.member.connected())
            try:
                await dial(self._node, CONTROL, self._control)
            except PeerLostError as error:
                _log.info("new session with the coordinator: %s", error.why)

    async def _watch_worker(self) -> None:
        raise await self._compute.died()

    # ── the control channel's receiver ───────────────────────────────────────────────────────────────────────────

    async def frame(
        self, channel: Channel, _header: Mapping[str, Any], payload: Stream, _length: int
    ) -> None:
        message = m.decode(await payload.receive_bytes(m.MAX_MESSAGE_BYTES))
        if channel is not self._control:
            return
        if isinstance(message, m.Begin):
            self._plane.keep_only(message.roster)
        self.perform(self.member.receive(message))

    def beat(self, channel: Channel) -> None:
        """The coordinator is alive; its silence ends the stream by itself."""

    def up(self, channel: Channel) -> None:
        _log.debug("control stream is up: %r", channel)

    def down(self, channel: Channel) -> None:
        _log.debug("control stream is down: %r", channel)

    # ── effects ──────────────────────────────────────────────────────────────────────────────────────────────────

    def perform(self, effects: Sequence[Effect]) -> None:
        """Carry out the core's effects, in order."""
        for effect in effects:
            self._perform(effect)
        self._changed.set()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case InStep(step, inner):
                self._perform_in_step(step, inner)
            case e.Tell(message):
                self._tell(message)
            case e.Choose(places):
                self.perform(self.member.chosen(choose_place(places, self.offer.memory_bytes)))
            case e.Prepare(begin, end):
                self._spawn(self._prepare(begin, end))
            case e.FetchState():
                self._fetch(effect)
            case e.SaveState(version, blocks):
                self._snapshot(version, blocks)
            case e.RecordApplied():
                self._record(effect)
            case e.EndStep(step):
                self._plane.end_step(step)
                self._store.end_step(step)
                if self._execution is not None:
                    self._spawn(self._execution.command(c.ClearStep()))
            case e.Leave(why):
                _log.warning("fenced by the coordinator: %s", why)
                self._spawn(self._rejoin())
            case e.Stop():
                if not self._over.done():
                    self._over.set_result(effect)
            case p.Release(handle):
                self._store.release(_tensor(handle))

    def _perform_in_step(self, step: e.StepId, effect: StepEffect) -> None:
        execution, member = self._execution, self.member
        assert execution is not None, "a step begins only after Prepare"
        match effect:
            case p.RunForward():
                self._spawn(execution.forward(member, step, effect))
            case p.RunBackward():
                self.figures.microbatches += 1
                self._spawn(execution.backward(member, step, effect))
            case p.ForgetGraph(key):
                self._spawn(execution.command(c.DropTask(task=f"{key.id}/{key.begin}")))
            case Merge(block, source, target):
                self._spawn(execution.command(c.MergeSlot(block=block, source=source, target=target)))
            case Drop(block, slot):
                self._spawn(execution.command(c.DropSlot(block=block, slot=slot)))
            case e.SumParts():
                self._spawn(execution.sum(member, step, effect))
            case e.Inspect():
                self._spawn(execution.inspect(member, step, effect))
            case e.ApplyUpdate():
                self._spawn(execution.apply(member, step, effect))
            case p.Release(handle):
                self._store.release(_tensor(handle))
            case _:
                self._send(step, effect, execution)

    def _send(self, step: e.StepId, effect: StepEffect, execution: Execution) -> None:
        own: dict[str, Any] = {"line": step.line, "step": step.number, "incarnation": self.member.incarnation}
        match effect:
            case p.SendActivation(number, route, attempt, handle):
                head = ActivationHead(**own, id=number, route=route, attempt=attempt)
                self._plane.send(route[0].peer, head, _tensor(handle))
            case p.SendGradient(number, to, border, handle):
                self._plane.send(to, GradientHead(**own, id=number, border=border), _tensor(handle))
            case e.SendPart(shard, slot):
                part = _shard_head("part", shard, own)
                self._spawn(
                    execution.export(
                        step, shard, slot, lambda piece: self._plane.send(shard.reducer, part, piece)
                    )
                )
            case e.SendResult(shard, to, handle):
                self._plane.send(to, _shard_head("result", shard, own), _tensor(handle))
            case _:
                raise AssertionError(effect)

    def _tell(self, message: m.Message) -> None:
        if self._control is not None:
            self._control.send(Parcel({}, (m.encode(message),)))

    # ── tensors and links ────────────────────────────────────────────────────────────────────────────────────────

    def _tensor_arrived(self, peer: str, head: Head, tensor: Tensor) -> None:
        plan = head.plan if isinstance(head, ShardHead) else None
        origin = Origin(peer, head.incarnation, head.step_id, plan)
        core = self.member
        match head:
            case ActivationHead():
                self.perform(core.activation(origin, head.id, head.route, head.attempt, tensor))
            case GradientHead():
                self.perform(core.gradient(origin, head.id, head.border, tensor))
            case ShardHead(kind="part"):
                self.perform(core.part(origin, head.block, head.index, tensor))
            case ShardHead():
                self.perform(core.result(origin, head.block, head.index, tensor))

    def _link_changed(self, peer: str, is_up: bool) -> None:
        if is_up:
            self.member.reachable(peer)
        else:
            _log.info("lost the link to %s", peer[-6:])
            self.perform(self.member.unreachable(peer))

    # ── joining ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _prepare(self, begin: int, end: int) -> None:
        """Fetch and load what the place needs; again and again while nobody can give it."""
        self._plane.use(None, None)
        for block in self._dump_rooms:
            await self._compute.submit(c.Unload(block=block))
        while True:
            try:
                prepared = [await prepare_block(self._compute, self._files, b) for b in range(begin, end)]
                specs = [spec for spec, _ in prepared]
                needs_data = any(spec.data for spec in specs)
                source = DataSource(self._manifest, *await self._files.shards()) if needs_data else None
                break
            except RemoteError as error:
                _log.warning("%s; trying again", error)
                await asyncio.sleep(PREPARE_RETRY_S)
        self._dump_rooms = {spec.index: room for spec, room in prepared}
        self._execution = Execution(self._compute, self._store, specs, source, self._manifest, self.perform)
        self._specs = specs
        self._plane.use(self._execution, self._store)
        self.perform(self.member.prepared())

    def _fetch(self, order: e.FetchState) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
        self._fetching = self._tasks.create_task(self._fetch_state(order))

    async def _fetch_state(self, order: e.FetchState) -> None:
        fetcher = StateFetcher(self._node, self._compute, self._coordinator)
        digests = await fetcher.load(order.version, self._specs, order.sources, order.digests)
        self.perform(self.member.state_loaded(order.line, order.version, digests))

    async def _rejoin(self) -> None:
        incarnation = await asyncio.to_thread(self._home.next_incarnation)
        self.perform(self.member.reborn(incarnation))
        if self._control is not None:
            self._control.close()

    # ── states ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _snapshot(self, version: int, blocks: Sequence[int]) -> None:
        """Copy the state of `blocks` before the next update can change it; the coordinator fetches the copy."""
        assert self._execution is not None
        self._snapshots = {key: kept for key, kept in self._snapshots.items() if key[0] == version}
        for block in blocks:
            digest = self.member.digests[block]
            copied = self._execution.dump(block, self._dump_rooms[block])
            self._spawn(self._keep_snapshot(version, block, digest, copied))

    async def _keep_snapshot(
        self, version: int, block: int, digest: str, copied: Coroutine[Any, Any, bytes]
    ) -> None:
        self._snapshots[version, block] = (await copied, digest)
        self._changed.set()

    async def state(self, version: int, block: int) -> Served | None:
        """The state of `block` at `version`: the checkpoint's copy, or what we hold if that is where we are."""
        try:
            async with asyncio.timeout(STATE_WAIT_S):
                while True:
                    if kept := self._snapshots.get((version, block)):
                        return Served(kept[0], {"digest": kept[1]})
                    if self._holds(version, block) and self._execution is not None:
                        digest = self.member.digests[block]
                        return Served(
                            await self._execution.dump(block, self._dump_rooms[block]), {"digest": digest}
                        )
                    if self.member.version is None or self.member.version > version:
                        return None
                    self._changed.clear()
                    await self._changed.wait()
        except (TimeoutError, CommandFailedError):
            return None

    def _holds(self, version: int, block: int) -> bool:
        member = self.member
        return member.version == version and block in member.digests and member.phase is not Phase.APPLYING

    # ── evidence ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _record(self, applied: e.RecordApplied) -> None:
        """One signed line per block in our own log, and the same to the coordinator, for the audit."""
        line, number = applied.step
        for cover in applied.covers:
            record = {
                "kind": "applied",
                "run": self._files.run.run_id,
                "peer": self._node.peer_id,
                "incarnation": self.member.incarnation,
                "term": line.term,
                "view": line.view,
                "step": number,
                "block": cover.block,
                "plan": applied.plan,
                "cover": [[holder, list(ids)] for holder, ids in cover.slots],
                "gradient": applied.gradients[cover.block],
                "state": applied.states[cover.block],
            }
            self._tell(m.EventLine(line=self._events.append(record)))
        self.figures.steps += 1

    def _spawn(self, work: Coroutine[Any, Any, None] | None) -> None:
        if work is not None:
            self._tasks.create_task(_tolerant(work))


def _tensor(handle: p.Handle) -> Tensor:
    assert isinstance(handle, Tensor)
    return handle


def _shard_head(kind: Any, shard: e.Shard, own: Mapping[str, Any]) -> ShardHead:
    return ShardHead(
        **own,
        kind=kind,
        plan=shard.plan,
        block=shard.block,
        index=shard.index,
        begin=shard.begin,
        end=shard.end,
    )


async def _tolerant(work: Coroutine[Any, Any, None]) -> None:
    """A command that failed in the worker concerns one step: the plan or the task is made again by the protocol."""
    try:
        await work
    except CommandFailedError as error:
        _log.warning("%s", error)


def rejection(stop: e.Stop) -> LocalError:
    """Why we may not take part, as the error that ends the command."""
    if stop.rejected == "version":
        return LocalError(
            "HP-RUN-002",
            "the run speaks another version",
            why=stop.why,
            fix="use the version of hetpeer the run was made for",
            exit_code=ExitCode.VERSION,
        )
    return LocalError("HP-RUN-010", "the run does not go on", why=stop.why, exit_code=ExitCode.RUN_CLOSED)
