"""What happens within a step, between the member core, the compute worker and the tensor channels.

Effects are carried out in the order in which they come; a worker command is posted at once, its answer waited for in a
task of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.member.held_step import Bundle
from hetpeer.averaging.member.member import Effect, Member, Origin, StepEffect
from hetpeer.averaging.member.tensor_heads import ActivationHead, GradientHead, Head, ShardHead
from hetpeer.peer.preparation.data_gate import DataGate
from hetpeer.peer.training.reduce_execution import ReduceExecution
from hetpeer.peer.training.spot_check_answers import SpotCheckAnswers
from hetpeer.peer.training.sum_proof_answers import SumProofAnswers
from hetpeer.peer.training.task_execution import TaskExecution
from hetpeer.peer.training.volunteer_figures import VolunteerFigures
from hetpeer.peer.transport.data_plane import DataPlane
from hetpeer.peer.transport.link_transcoder import LinkTranscoder
from hetpeer.peer.transport.tensor_schema import TensorSchema
from hetpeer.peer.transport.tensor_store import Tensor, TensorStore
from hetpeer.peer.transport.worker_posts import WorkerPosts
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc.arena import ArenaFullError
from hetpeer.stages.ipc.results import CommandFailedError
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.gradient_slots import Drop, Merge
from hetpeer.stages.pipeline.routes import Hop

Work = Coroutine[Any, Any, None]
LATE_S = 0.05

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """All that carries out the effects of a step for the blocks that we hold."""

    schema: TensorSchema
    posts: WorkerPosts
    tasks: TaskExecution
    checking: SpotCheckAnswers
    reducing: ReduceExecution
    proving: SumProofAnswers
    transcoding: LinkTranscoder
    gate: DataGate


class StepDriver:
    """The step effects of `member`. `spawn` runs a task, `perform` carries out effects, `state_lost` rejoins."""

    def __init__(
        self,
        member: Member,
        plane: DataPlane,
        store: TensorStore,
        figures: VolunteerFigures,
        spawn: Callable[[Work], None],
        perform: Callable[[Sequence[Effect]], None],
        state_lost: Callable[[], None],
    ) -> None:
        self._member = member
        self._plane = plane
        self._store = store
        self._figures = figures
        self._spawn = spawn
        self._perform = perform
        self._state_lost = state_lost
        self._place: Place | None = None
        self._sent: set[tuple[e.StepId, int, Hop]] = set()
        """Microbatches of the steps in progress, and where they went on to."""
        self._late: deque[tuple[e.StepId, Callable[[], Work | None]]] = deque()
        """Bundles of a step to be sent once there is room in memory to read or to write them."""
        self._undecoded: list[tuple[e.StepId, Callable[[], Work | None]]] = []
        """What has come of a step and is to be decoded once there is room for that."""

    def use(self, place: Place | None) -> None:
        """The worker's side of our place; None: we have none, and take no tensors."""
        if self._place is not None:
            self._place.gate.close()
        self._place = place
        self._plane.use(None if place is None else place.schema, self._store)

    def run(self, step: e.StepId, effect: StepEffect) -> None:
        """Carry out one effect of `step`."""
        place, member = self._place, self._member
        assert place is not None, "a step begins only after Prepare"
        match effect:
            case p.RunForward():
                self._start(place.checking.forward(step, effect))
                self._start(place.tasks.forward(member, step, effect))
            case p.RunBackward():
                self._start(place.checking.backward(step, effect))
                self._start(self._counted(step, place.tasks.backward(member, step, effect)))
            case p.ForgetGraph(key):
                self._start(place.posts.command(c.DropTask(step=step.number, task=str(key))))
            case Merge(block, source, target):
                self._start(
                    place.posts.command(
                        c.MergeSlot(step=step.number, block=block, source=source, target=target)
                    )
                )
            case Drop(block, slot):
                self._start(place.posts.command(c.DropSlot(step=step.number, block=block, slot=slot)))
            case e.SumParts():
                self._start(place.reducing.sum(member, step, effect))
            case e.Inspect():
                self._start(place.reducing.inspect(member, step, effect))
            case p.CompareBundle():
                self._start(place.checking.compare(step, effect))
            case e.ShowMarks(asked):
                self._start(place.proving.show(step, effect, place.checking.given(step, asked)))
            case e.ProveSums():
                self._start(place.proving.prove(step, effect))
            case e.TestifyParts(asked):
                place.proving.testify(step, asked)
            case e.ShareUplink(elements):
                if not place.reducing.coded_smaller:
                    self._plane.share_uplink(step.on_wire, elements)
            case e.KeepCopy(block):
                self._start(place.posts.command(v.CopyBlock(block=block)))
            case e.ApplyUpdate() | e.InstallAverage():
                self._spawn(self._apply(place.reducing.apply(member, step, effect)))
            case p.Release(handle):
                self.release(handle)
            case _:
                self._send(step, effect, place)

    def end(self, step: e.StepId) -> None:
        """Nothing of `step` is needed any more."""
        self._sent = {sent for sent in self._sent if sent[0] != step}
        self._late = deque(late for late in self._late if late[0] != step)
        self._undecoded = [late for late in self._undecoded if late[0] not in (step, step.on_wire)]
        for name in {step, step.on_wire}:
            self._plane.end_step(name)
            self._store.end_step(name)
            if self._place is not None:
                self._place.gate.end_step(name)
                self._place.tasks.end_step(name)
                self._place.transcoding.end_step(name)
                self._place.checking.end_step(name)
                self._place.proving.end_step(name)
        if self._place is not None:
            self._start(
                self._place.posts.command(v.DropCopies() if step.group else c.ClearStep(step=step.number))
            )

    def release(self, handle: p.Handle) -> None:
        self._store.release(_tensor(handle))

    def received(self, message: m.Message) -> None:
        """A message of the coordinator."""
        if self._place is not None and isinstance(message, m.Begin | m.Reroute):
            self._place.gate.message(message, self._receive)
        else:
            self._receive(message)

    def arrived(self, peer: str, head: Head, tensor: Tensor) -> None:
        """A tensor of `peer`, its head and length already checked."""
        if head.coded is None:
            self._bundle_or_shard(peer, head, tensor)
        elif self._place is None:
            self._store.release(tensor)
        else:
            plain, into = head.model_copy(update={"coded": None}), self._place.transcoding.into
            then = partial(self._bundle_or_shard, peer, plain)
            self._decode(head.step_id, partial(into, head.step_id, peer, head, tensor, then))

    def unread(self, peer: str, head: ActivationHead | GradientHead, why: str) -> None:
        """A bundle of `peer` is none. One of a spot check is nobody's but the check's, which lapses."""
        origin = Origin(peer, head.incarnation, head.step_id, None)
        match head:
            case GradientHead():
                self._perform(self._member.work.unread(origin, head.id, head.border, why, back=True))
            case ActivationHead() if not (head.check or head.asks):
                self._perform(self._member.work.unread(origin, head.id, head.route[0].begin, why, back=False))
            case _:
                pass

    def _bundle_or_shard(self, peer: str, head: Head, tensor: Tensor) -> None:
        plan = head.plan if isinstance(head, ShardHead) else None
        origin = Origin(peer, head.incarnation, head.step_id, plan)
        core = self._member
        match head:
            case ActivationHead() if self._place is not None:
                self._place.gate.activation(head, lambda: self._activation(origin, head, tensor))
            case ActivationHead():
                self._activation(origin, head, tensor)
            case GradientHead():
                self._perform(core.work.gradient(origin, head.id, head.border, tensor, head.check))
                self._of_use(peer, head, tensor)
            case ShardHead(kind="part"):
                self._perform(core.work.part(origin, head.block, head.index, tensor))
            case ShardHead():
                self._perform(core.work.result(origin, head.block, head.index, tensor, head.end - head.begin))

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _receive(self, message: m.Message) -> None:
        self._perform(self._member.receive(message))

    def _activation(self, origin: Origin, head: ActivationHead, tensor: Tensor) -> None:
        bundle = Bundle(head.id, head.route, head.attempt, head.check, head.asks)
        self._perform(self._member.work.activation(origin, bundle, tensor))
        self._of_use(origin.sender, head, tensor)

    def _of_use(self, peer: str, head: Head, tensor: Tensor) -> None:
        if not tensor.released:  # else nobody waits for it
            self._plane.of_use(peer, head, tensor)

    def _send(self, step: e.StepId, effect: StepEffect, place: Place) -> None:
        wire = step.on_wire
        own: dict[str, Any] = {
            "line": wire.line,
            "step": wire.number,
            "incarnation": self._member.incarnation,
        }
        match effect:
            case p.SendActivation(number, route, attempt, handle, check, asks):
                head = ActivationHead(**own, id=number, batch=step.batch, route=route, attempt=attempt)
                head = head.model_copy(update={"check": check, "asks": asks})
                if (step, number, route[0]) in self._sent and not (check or asks):
                    self._plane.nudge(route[0].peer, head, _tensor(handle).nbytes)
                if not (check or asks):
                    self._sent.add((step, number, route[0]))
                out = partial(place.transcoding.out, step, route[0].peer, head, _tensor(handle))
                self._send_bundle(step, out)
            case p.SendGradient(number, to, border, handle, check):
                back = GradientHead(**own, id=number, border=border, check=check)
                self._send_bundle(step, partial(place.transcoding.out, step, to, back, _tensor(handle)))
            case e.SendPart(shard, slot):
                part = _shard_head("part", shard, own)
                to_reducer = partial(self._send_shard, place, shard.reducer, part)
                self._start(place.reducing.export(step, shard, slot, to_reducer))
            case e.SendResult(shard, to, handle):
                self._send_shard(place, to, _shard_head("result", shard, own), _tensor(handle))
            case _:
                raise AssertionError(effect)

    def _send_shard(self, place: Place, to: str, head: ShardHead, tensor: Tensor) -> None:
        out = place.reducing.outgoing(to, tensor)
        if out.coded:
            head = head.model_copy(update={"coded": place.reducing.coded(head.end - head.begin)})
        self._plane.send(to, head, out)

    def _send_bundle(self, step: e.StepId, out: Callable[[], Work | None]) -> None:
        """`out` sends it, or raises ArenaFullError: then it is tried again once there may be room."""
        if self._late or not self._goes(out):
            self._late.append((step, out))
            if len(self._late) == 1:
                self._spawn(self._send_late())

    async def _send_late(self) -> None:
        while self._late:
            await asyncio.sleep(LATE_S)
            while self._late and self._goes(self._late[0][1]):
                self._late.popleft()

    def _decode(self, step: e.StepId, into: Callable[[], Work | None]) -> None:
        """`into` does it, or raises ArenaFullError: then what has come is kept, and it is tried again once there may be room. None waits for another: what is
        farther from the loss could wait for what is nearer.
        """
        if not self._goes(into):
            self._undecoded.append((step, into))
            if len(self._undecoded) == 1:
                self._spawn(self._decode_late())

    async def _decode_late(self) -> None:
        while self._undecoded:
            await asyncio.sleep(LATE_S)
            self._undecoded = [late for late in self._undecoded if not self._goes(late[1])]

    def _goes(self, out: Callable[[], Work | None]) -> bool:
        try:
            self._start(out())
        except ArenaFullError:
            return False
        return True

    def _start(self, work: Work | None) -> None:
        if work is not None:
            self._spawn(_tolerant(work))

    async def _counted(self, step: e.StepId, work: Work) -> None:
        await work
        self._figures.worked(step.number, time.monotonic())

    async def _apply(self, work: Work) -> None:
        try:
            await work
        except CommandFailedError as error:
            _log.warning("an update could not be applied: %s", error)
            self._state_lost()


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


async def _tolerant(work: Work) -> None:
    """A command that failed in the worker concerns one step: the plan or the task is made again by the protocol."""
    try:
        await work
    except CommandFailedError as error:
        _log.warning("%s", error)
