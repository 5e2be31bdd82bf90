"""The driver of steps: carries out a step's effects, and brings what peers send to the member core.

Effects are carried out in the order in which they come: a worker command is posted at once, and a task of its
own waits for its answer. The table in `StepDriver.use` names the methods for each effect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.effect_queue import EffectQueue
from hetpeer.averaging.effects import Effect, InStep
from hetpeer.averaging.member.held_step import Bundle
from hetpeer.averaging.member.member import Member
from hetpeer.averaging.member.position import Origin
from hetpeer.averaging.member.tensor_heads import ActivationHead, GradientHead, Head, ShardHead
from hetpeer.averaging.member.work_in_progress import WorkerOccupation
from hetpeer.dht.base import failpoints
from hetpeer.peer.preparation.data_source import DataGate
from hetpeer.peer.process.span_trace import Trace
from hetpeer.peer.training.check_answers import SpotCheckAnswers, SumProofAnswers
from hetpeer.peer.training.parts_in_turn import PartsInTurn
from hetpeer.peer.training.reduce_execution import ReduceExecution
from hetpeer.peer.training.task_execution import HeldPlace, TaskExecution, task_name
from hetpeer.peer.training.volunteer_figures import VolunteerFigures
from hetpeer.peer.transport.data_plane import DataPlane
from hetpeer.peer.transport.link_transcoder import CodedBundles, LinkTranscoder, MemoryWait
from hetpeer.peer.transport.tensor_store import Tensor, TensorStore
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc.worker_messages import CommandFailedError
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.gradient_slots import Drop, Merge
from hetpeer.stages.pipeline.routes import Hop

Work = Coroutine[Any, Any, None]
CarryOut = Callable[[e.StepId, Any], Work | None]
"""Carries out an effect of a step: posts the worker command, and returns what waits for the answer."""
Kind = TypeVar("Kind")

_log = logging.getLogger(__name__)


class KeepsSteps(Protocol):
    """Keeps something for each step in progress."""

    def end_step(self, step: e.StepId) -> None:
        """Forget everything kept for `step`."""


class StepDriver:
    """The steps of `member`.

    `perform` queues effects of the core and carries them out. Those that belong to no step go to `beside`.
    `spawn` runs a task, `state_lost` rejoins with the state fetched anew.
    """

    def __init__(
        self,
        member: Member,
        plane: DataPlane,
        store: TensorStore,
        figures: VolunteerFigures,
        spawn: Callable[[Work], object],
        beside: Callable[[Effect], None],
        trace: Trace,
        state_lost: Callable[[], None],
    ) -> None:
        self._member = member
        self._plane = plane
        self._store = store
        self._figures = figures
        self._spawn = spawn
        self.changed = asyncio.Event()
        """Set after every batch of effects: the state of the volunteer may have changed."""
        self._effects: EffectQueue[Effect] = EffectQueue(self._carry_out, self._drained)
        self.perform = self._effects.perform
        self._beside = beside
        self._trace = trace
        self._state_lost = state_lost
        self._closed = False
        self._place: HeldPlace | None = None
        self._gate: DataGate
        self._table: dict[type, tuple[CarryOut, ...]] = {}
        """Effect → methods that carry it out, in this order."""
        self._sent: set[tuple[e.StepId, int, Hop]] = set()
        """Microbatches of the steps in progress, and the hops that they went on to."""
        self._waiting = MemoryWait(self._start, spawn)

    def use(self, place: HeldPlace | None) -> None:
        """Work for `place` from now on; None: we have none, and take no tensors."""
        if self._place is not None:
            self._gate.close()
        self._place = place
        self._plane.use(None if place is None else place.schema, self._store)
        if place is None:
            return
        self._gate = DataGate(place.data, place.tasks)
        self._tasks = tasks = TaskExecution(place)
        self._checks = checks = SpotCheckAnswers(place)
        self._proofs = proofs = SumProofAnswers(place)
        self._reduces = reduces = ReduceExecution(place, proofs)
        self._parts = PartsInTurn(self._export, self._start)
        self._transcoder = LinkTranscoder(
            place.posts, place.schema, place.book, place.me, self._plane.send, place.offended, self.unread
        )
        command, checked = place.posts.command, place.schema.trust.spot_checks
        self._table = dict(
            (
                # tasks; inputs are noted for spot checks while they are here
                _on(p.RunForward, tasks.forward, first=checks.forward if checked else None),
                _on(p.RunBackward, self._backward, first=checks.backward if checked else None),
                _on(
                    p.ForgetGraph,
                    lambda step, x: command(c.DropTask(step=step.number, task=task_name(x.key))),
                ),
                _on(Merge, self._change_slot),
                _on(Drop, self._change_slot),
                _on(p.SendActivation, self._send_activation),
                _on(p.SendGradient, self._send_gradient),
                _on(p.Release, lambda _step, x: self.release(x.handle)),
                # reduce and update
                _on(e.SendPart, self._parts.send),
                _on(e.SumParts, reduces.sum),
                _on(
                    e.SendResult,
                    self._send_result,
                ),
                _on(e.Land, reduces.land),
                _on(e.ShareUplink, self._share_uplink),
                _on(e.Inspect, reduces.inspect),
                _on(e.InspectSlot, reduces.inspect_slot),
                _on(e.KeepCopy, lambda _step, x: command(v.CopyBlock(block=x.block))),
                _on(e.ApplyUpdate, self._apply),
                _on(e.InstallAverage, self._apply),
                # spot checks and sum proofs
                _on(p.CompareBundle, checks.compare),
                _on(e.ShowMarks, lambda step, x: proofs.show(step, x, checks.given(step, x.asked))),
                _on(e.ProveSums, proofs.prove),
                _on(e.TestifyParts, proofs.testify),
            )
        )

    def _carry_out(self, effect: Effect) -> None:
        """Carry out one effect: of a step by the methods of `_table`, other effects by `beside`."""
        if not isinstance(effect, InStep):
            self._beside(effect)
            return
        step, inner = effect.step, effect.effect
        if failpoints.armed:
            failpoints.before(inner, "average_" if step.group else "")
        for carry_out in self._table[type(inner)]:
            if (work := carry_out(step, inner)) is not None:
                self._spawn(_tolerant(work))

    def _drained(self) -> None:
        """Note, after a batch of effects, whether the worker computes or what it waits for."""
        self.changed.set()
        over = self._figures.shares.note(self._member.work.occupation, time.monotonic())
        if over is not None and over[0] is not WorkerOccupation.COMPUTES:
            self._trace.span("waits", f"for {over[0].value}", over[1])

    def end(self, step: e.StepId) -> None:
        """Forget `step`, here and in everything that keeps something of it."""
        self._sent = {sent for sent in self._sent if sent[0] != step}
        place = self._place
        keepers: list[KeepsSteps] = [self._waiting, self._plane]
        if place is not None:
            keepers += [self._parts, self._reduces, self._gate, self._tasks, self._transcoder]
            keepers += [self._checks, self._proofs]
        for name in {step, step.on_wire}:
            for keeper in (*keepers, self._store):  # memory is freed when nothing is waiting for it any more
                keeper.end_step(name)
        if place is not None:
            self._start(place.posts.command(v.DropCopies() if step.group else c.ClearStep(step=step.number)))

    def coded_bundles(self, step: e.StepId) -> CodedBundles:
        """How the bundles of `step` were coded that came here, or left here."""
        return {} if self._place is None else self._transcoder.coded_bundles(step)

    def release(self, handle: p.Handle) -> None:
        """Free a tensor of ours."""
        self._store.release(_tensor(handle))

    def close(self) -> None:
        """Take no tensors any more, and carry out no effects."""
        self._closed = True
        self._effects.close()

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────

    def received(self, message: m.Message) -> None:
        """A message of the coordinator. Tasks in it come to the core when their data is here."""
        if self._place is not None and isinstance(message, m.Begin | m.Reroute):
            self._gate.message(message, self._receive)
        else:
            self._receive(message)

    def arrived(self, peer: str, head: Head, tensor: Tensor) -> None:
        """A tensor of `peer`, or of our own to ourselves; its head and length are checked already."""
        if self._closed:
            return
        if head.coded is None:
            self._bundle_or_shard(peer, head, tensor)
        elif self._place is None:
            self._store.release(tensor)
        else:
            plain, into = head.model_copy(update={"coded": None}), self._transcoder.into
            then = partial(self._bundle_or_shard, peer, plain)
            self._waiting.decode(head.step_id, partial(into, head.step_id, peer, head, tensor, then))

    def unread(self, peer: str, head: ActivationHead | GradientHead, why: str) -> None:
        """A bundle of `peer` is malformed. One of a spot check concerns the check alone, which lapses."""
        if self._closed:
            return
        origin, work = Origin(peer, head.incarnation, head.step_id, None), self._member.work
        match head:
            case GradientHead():
                self.perform(work.unread(origin, head.id, head.border, why, back=True))
            case ActivationHead() if not (head.check or head.asks):
                self.perform(work.unread(origin, head.id, head.route[0].begin, why, back=False))
            case _:
                pass

    def _receive(self, message: m.Message) -> None:
        self.perform(self._member.receive(message))

    def _bundle_or_shard(self, peer: str, head: Head, tensor: Tensor) -> None:
        """Give an arrived tensor to the core."""
        plan = head.plan if isinstance(head, ShardHead) else None
        origin = Origin(peer, head.incarnation, e.StepId(head.line, head.step), plan)
        work = self._member.work
        match head:
            case ActivationHead() if self._place is not None:
                self._gate.activation(head, lambda: self._activation(origin, head, tensor))
            case ActivationHead():
                self._activation(origin, head, tensor)
            case GradientHead():
                self.perform(work.gradient(origin, head.id, head.border, tensor, head.check))
                self._of_use(peer, head, tensor)
            case ShardHead(kind="part"):
                self.perform(work.part(origin, head.block, head.index, tensor))
            case ShardHead():
                self.perform(work.result(origin, head.block, head.index, tensor, head.end - head.begin))

    def _activation(self, origin: Origin, head: ActivationHead, tensor: Tensor) -> None:
        bundle = Bundle(head.id, head.route, head.attempt, head.check, head.asks)
        self.perform(self._member.work.activation(origin, bundle, tensor))
        self._of_use(origin.sender, head, tensor)

    def _of_use(self, peer: str, head: Head, tensor: Tensor) -> None:
        if not tensor.released:  # a released one was of no use: no step waits for it
            self._plane.of_use(peer, head, tensor.nbytes)

    # ── effects ─────────────────────────────────────────────────────────────────────────────────────────────

    def _backward(self, step: e.StepId, effect: p.RunBackward) -> Work:
        posted = self._tasks.backward(step, effect)

        async def counted() -> None:
            await posted
            self._figures.worked(step.number, time.monotonic())

        return counted()

    def _share_uplink(self, step: e.StepId, effect: e.ShareUplink) -> None:
        if not self._reduces.coded_smaller:
            self._plane.share_uplink(step.on_wire, effect.elements)

    def _head(self, step: e.StepId) -> dict[str, Any]:
        """The fields of a head that name the step, and us."""
        wire = step.on_wire
        return {"line": wire.line, "step": wire.number, "incarnation": self._member.life.hello.incarnation}

    def _send_activation(self, step: e.StepId, effect: p.SendActivation) -> None:
        """Queue an activation; one that was sent before is preceded by a nudge."""
        route, tensor, peer = effect.route, _tensor(effect.handle), effect.route[0].peer
        head = ActivationHead(
            **self._head(step),
            id=effect.id,
            batch=step.batch,
            route=route,
            attempt=effect.attempt,
            check=effect.check,
            asks=effect.asks,
        )
        if not (effect.check or effect.asks):
            if (step, effect.id, route[0]) in self._sent:
                self._plane.nudge(peer, head, tensor.nbytes)
            self._sent.add((step, effect.id, route[0]))
        self._waiting.send(step, partial(self._transcoder.out, step, peer, head, tensor))

    def _send_gradient(self, step: e.StepId, effect: p.SendGradient) -> None:
        tensor = _tensor(effect.handle)
        head = GradientHead(**self._head(step), id=effect.id, border=effect.border, check=effect.check)
        self._waiting.send(step, partial(self._transcoder.out, step, effect.to, head, tensor))

    def _export(self, step: e.StepId, part: e.SendPart, free: Callable[[], None]) -> Work:
        then = partial(self._send_shard, step, "part", part.shard, part.shard.reducer)
        return self._reduces.export(step, part, then, free)

    def _change_slot(self, step: e.StepId, effect: Merge | Drop) -> Work:
        """Merge a slot into another or drop it: no part of it as it was is sent any more."""
        assert self._place is not None
        if isinstance(effect, Drop):
            self._parts.slot_changed(step, effect.block, effect.slot)
            command: c.DropSlot | c.MergeSlot = c.DropSlot(
                step=step.number, block=effect.block, slot=effect.slot
            )
        else:
            self._parts.slot_changed(step, effect.block, effect.target)
            command = c.MergeSlot(
                step=step.number, block=effect.block, source=effect.source, target=effect.target
            )
        return self._place.posts.command(command)

    def _send_result(self, step: e.StepId, effect: e.SendResult) -> None:
        """Send a sum. Its memory is free when it has arrived at all receivers."""
        sent = self._store.share(self._reduces.outgoing(effect.to, _tensor(effect.handle)))
        sent.once = True
        self._send_shard(step, "result", effect.shard, effect.to, sent)

    def _send_shard(self, step: e.StepId, kind: Any, shard: e.Shard, to: str, tensor: Tensor) -> None:
        """Send a part or a result of a shard, as the codec of reduces writes it."""
        head = ShardHead(
            **self._head(step),
            kind=kind,
            plan=shard.plan,
            block=shard.block,
            index=shard.index,
            begin=shard.begin,
            end=shard.end,
        )
        out = self._reduces.outgoing(to, tensor)
        if out.coded:
            head = head.model_copy(update={"coded": self._reduces.coded(head.end - head.begin)})
        self._plane.send(to, head, out)

    def _apply(self, step: e.StepId, effect: e.ApplyUpdate | e.InstallAverage) -> Work:
        """Apply an update or an average; if that fails, rejoin with the state fetched anew."""
        posted = self._reduces.apply(step, effect)

        async def applied() -> None:
            try:
                await posted
            except CommandFailedError as error:
                _log.warning("an update could not be applied: %s", error)
                self._state_lost()

        return applied()

    def _start(self, work: Work) -> None:
        """Run `work` in the background; a command that fails in the worker ends only this work."""
        self._spawn(_tolerant(work))


def _on(
    kind: type[Kind],
    carry_out: Callable[[e.StepId, Kind], Work | None],
    first: Callable[[e.StepId, Kind], Work | None] | None = None,
) -> tuple[type, tuple[CarryOut, ...]]:
    """A row of the table: for an effect of `kind`, call `first`, if any, and then `carry_out`.

    mypy checks that both take this kind.
    """
    return kind, (carry_out,) if first is None else (first, carry_out)


def _tensor(handle: p.Handle) -> Tensor:
    assert isinstance(handle, Tensor)
    return handle


async def _tolerant(work: Work) -> None:
    """A command that failed in the worker concerns one step: the protocol makes its plan or task again."""
    try:
        await work
    except CommandFailedError as error:
        _log.warning("%s", error)
