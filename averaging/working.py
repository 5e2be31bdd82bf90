"""The side of a member that faces its worker and its peers: finished work, links and tensors of the step in progress.

Pure. Everything here belongs to one step, named by the driver or by the tensor's origin; what is of another step is
released and changes nothing. The side that faces the coordinator is member.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hetpeer.averaging import messages as m
from hetpeer.averaging.early import Due, EarlyTensors, Origin, Waiting, due_outside
from hetpeer.averaging.effects import EndStep, Shard, StepId
from hetpeer.averaging.holding import Effect, HeldStep
from hetpeer.stages.execution.effects import Handle, Release, TaskKey
from hetpeer.stages.execution.routes import Route
from hetpeer.stages.execution.slots import SlotBook


class Working:
    """Where a volunteer stands (`line`, `version`) and the step that it works on."""

    def __init__(self) -> None:
        self.line = m.Line(term=0, view=0)
        self.version: int | None = None
        """Of the state in the worker; None while there is none to be trusted."""
        self._step: HeldStep | None = None
        self._round: HeldStep | None = None
        """The averaging that we take part in; beside a step if it is a delayed one."""
        self._group = (0, 0)
        """Term and number of the last group that we averaged with."""
        self._early: EarlyTensors[HeldStep, list[Effect]] = EarlyTensors()
        self._shunned: set[str] = set()
        self._congested: dict[str, int] = {}

    @property
    def step(self) -> StepId | None:
        """The step in progress, or the averaging if there is none."""
        one = self._step or self._round
        return one.id if one else None

    @property
    def slots(self) -> SlotBook | None:
        """The slots of the step in progress."""
        return self._step.pipeline.slots if self._step else None

    def holds(self, commit: m.Commit) -> bool:
        """Whether we hold the gradients that `commit` names."""
        return any(one.matches(commit) for one in self._under_way())

    def _under_way(self) -> list[HeldStep]:
        return [one for one in (self._step, self._round) if one is not None]

    def works_on(self, step: StepId) -> bool:
        """Whether this step or averaging is in progress."""
        return self._in(step) is not None

    def _in(self, step: StepId) -> HeldStep | None:
        """The step or averaging in progress, if it is this one."""
        return next((one for one in self._under_way() if one.id == step), None)

    def _at_origin(self, origin: Origin) -> HeldStep | None:
        """The step or averaging in progress that `origin` is of."""
        return next((one for one in self._under_way() if one.is_at(origin.step)), None)

    def _drop_step(self) -> list[Effect]:
        step, self._step = self._step, None
        return self._ended(step)

    def _drop_round(self) -> list[Effect]:
        one, self._round = self._round, None
        return self._ended(one)

    def _ended(self, held: HeldStep | None) -> list[Effect]:
        if held is None:
            return []
        self._early.forget(held.id.on_wire)
        return [EndStep(held.id)]

    def _drop_all(self) -> list[Effect]:
        return [*self._drop_step(), *self._drop_round()]

    # ── finished work ────────────────────────────────────────────────────────────────────────────────────────────

    def forward_done(
        self, step: StepId, key: TaskKey, output: Handle | None, loss: float | None
    ) -> list[Effect]:
        """`RunForward` is done."""
        held = self._in(step)
        if held is None:
            return [] if output is None else [Release(output)]
        return held.absorb(held.pipeline.forward_done(key, output, loss))

    def backward_done(self, step: StepId, key: TaskKey, input_gradient: Handle | None) -> list[Effect]:
        """`RunBackward` is done."""
        held = self._in(step)
        if held is None:
            return [] if input_gradient is None else [Release(input_gradient)]
        return held.absorb(held.pipeline.backward_done(key, input_gradient))

    def work_failed(self, step: StepId, key: TaskKey, why: str) -> list[Effect]:
        """`RunForward` or `RunBackward` could not be done."""
        held = self._in(step)
        return [] if held is None else held.absorb(held.pipeline.work_failed(key, why))

    def summed(self, step: StepId, shard: Shard, handle: Handle) -> list[Effect]:
        """`SumParts` is done."""
        held = self._in(step)
        return [Release(handle)] if held is None else held.summed(shard, handle)

    def unusable(self, step: StepId, shard: Shard, part: int, why: str) -> list[Effect]:
        """`SumParts` cannot be done: number `part` of its parts is no such thing."""
        held = self._in(step)
        return [] if held is None else held.unusable(shard, part, why)

    def inspected(self, step: StepId, plan: int, vote: m.BlockVote, gradient: Handle) -> list[Effect]:
        """`Inspect` is done."""
        held = self._in(step)
        return [Release(gradient)] if held is None else held.inspected(plan, vote, gradient)

    # ── links and tensors ────────────────────────────────────────────────────────────────────────────────────────

    def unreachable(self, peer: str) -> list[Effect]:
        """Our link to `peer` is down and could not be opened again."""
        step = self._step
        return [] if step is None else step.absorb(step.pipeline.unreachable(peer))

    def reachable(self, peer: str) -> None:
        """The link to `peer` is up again."""
        if self._step is not None and peer not in self._shunned:
            self._step.pipeline.reachable(peer)

    def refused(self, peer: str, for_now: bool) -> list[Effect]:
        """We do not work with `peer` for now, whatever the step: its tasks go elsewhere. Or we do again."""
        if for_now:
            self._shunned.add(peer)
            return self.unreachable(peer)
        self._shunned.discard(peer)
        self.reachable(peer)
        return []

    def congested(self, peer: str, hops: int | None) -> list[Effect]:
        """Our link to `peer` takes no forwards that have `hops` or more hops behind it; None: it takes all."""
        step = self._step
        if hops is None:
            self._congested.pop(peer, None)
            return [] if step is None else step.absorb(step.pipeline.relieved(peer))
        self._congested[peer] = hops
        return [] if step is None else step.absorb(step.pipeline.congested(peer, hops))

    def introduced(self, origin: Origin, place: m.Range) -> list[Effect]:
        """`origin.sender` takes part in the step, as the coordinator's ticket says or we know: it gets what is left over for
        the blocks `place`.
        """
        step = self._at_origin(origin)
        if step is None:
            return []
        return [*step.joined(origin.sender, origin.incarnation, place), *self._replay_early()]

    def knows(self, origin: Origin) -> bool:
        """Whether `origin.sender` is known to take part in the step that it speaks of."""
        step = self._at_origin(origin)
        return step is not None and step.due(origin) is Due.NOW

    def leftovers(self) -> Mapping[int, tuple[int, ...]]:
        """Border → ids of the step in progress whose bundles we keep for a holder that we do not know."""
        return {} if self._step is None else self._step.pipeline.leftovers()

    @property
    def is_idle(self) -> bool:
        """Whether a step is in progress, and nothing for us to do in it: we can take leftovers."""
        return self._step is not None and self._step.reduction is None and self._step.pipeline.idle

    def activation(
        self, origin: Origin, microbatch: int, route: Route, attempt: int, handle: Handle
    ) -> list[Effect]:
        """A bundle of activations from the hop before us; `route` starts with our own hop."""

        def accept(step: HeldStep) -> list[Effect]:
            return step.activation(origin.sender, microbatch, route, attempt, handle)

        return self._take(origin, handle, accept)

    def nudge(self, origin: Origin, microbatch: int, route: Route, attempt: int) -> list[Effect]:
        """An activation that comes again waits for credit; a task of ours that knows it need not wait."""
        step = self._at_origin(origin)
        if step is None or step.due(origin) is not Due.NOW:
            return []
        return step.nudge(origin.sender, microbatch, route, attempt)

    def gradient(self, origin: Origin, microbatch: int, border: int, handle: Handle) -> list[Effect]:
        """The gradient of a bundle that we had sent over `border`."""

        def accept(step: HeldStep) -> list[Effect]:
            return step.absorb(step.pipeline.gradient(microbatch, border, handle))

        return self._take(origin, handle, accept)

    def part(self, origin: Origin, block: int, index: int, handle: Handle) -> list[Effect]:
        """A holder's slot, one shard of it, for us to sum."""
        return self._take(origin, handle, lambda step: step.part(origin.sender, block, index, handle))

    def result(self, origin: Origin, block: int, index: int, handle: Handle) -> list[Effect]:
        """A reducer's sum of one shard."""
        return self._take(origin, handle, lambda step: step.result(origin.sender, block, index, handle))

    def _take(
        self, origin: Origin, handle: Handle, accept: Callable[[HeldStep], list[Effect]]
    ) -> list[Effect]:
        step = self._at_origin(origin)
        due = due_outside(origin, self.line, self.version, self._group) if step is None else step.due(origin)
        if due is Due.NOW and step is not None:
            return accept(step)
        if due is Due.LATER and self._early.hold(Waiting(origin, accept, handle)):
            return []
        return [Release(handle)]

    def _replay_early(self) -> list[Effect]:
        """What waited for the message that has just been handled; the rest goes on waiting or is released."""
        return [
            effect
            for tensor in self._early.take()
            for effect in self._take(tensor.origin, tensor.handle, tensor.accept)
        ]
