"""The side of a member that faces its worker and its peers: finished work, links and tensors of the steps in progress.

Pure. Everything here belongs to one step, named by the driver or by the tensor's origin; what is of a step that is not in progress is
released and changes nothing. There is one, or some more where steps overlap (docs/asynchronous.md). The side that faces the coordinator is member.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import Effect, EndStep, Look, Shard, StepId, Tell
from hetpeer.averaging.member.early_tensors import Due, EarlyTensors, Origin, Waiting, due_outside
from hetpeer.averaging.member.held_step import Bundle, HeldStep
from hetpeer.stages.pipeline.effects import Handle, Release, TaskKey
from hetpeer.stages.pipeline.gradient_slots import SlotBook
from hetpeer.stages.pipeline.in_flight import Window
from hetpeer.stages.pipeline.routes import Route
from hetpeer.stages.pipeline.utilization import Occupation
from hetpeer.stages.pipeline.worker_queue import Bench

MOST_SHUNNED = 256


class Working:
    """Where a volunteer stands (`line`, `version`) and the steps that it works on. `window`: microbatches that may be under way."""

    def __init__(self, window: Window | None) -> None:
        self.line = m.Line(term=0, view=0)
        self.version: int | None = None
        """Of the state in the worker; None while there is none to be trusted."""
        self._steps: list[HeldStep] = []
        """In their order: the first is the next to be committed."""
        self._bench = Bench(window)
        self._round: HeldStep | None = None
        """The averaging that we take part in; beside a step if it is a delayed one."""
        self._group = (0, 0)
        """Term and number of the last group that we averaged with."""
        self._early: EarlyTensors[HeldStep, list[Effect]] = EarlyTensors()
        self._lately: frozenset[str] = frozenset()
        """Who took part in what ended last."""
        self._shunned: set[str] = set()
        self._told_shunned: set[str] = set()
        """Those that the coordinator knows of."""
        self._congested: dict[str, int] = {}

    @property
    def step(self) -> StepId | None:
        """The oldest step in progress, or the averaging if there is none."""
        return next((one.id for one in self._under_way()), None)

    @property
    def partners(self) -> frozenset[str]:
        """Who takes part in that, as far as we know."""
        return next((one.partners for one in self._under_way()), frozenset())

    @property
    def steps(self) -> list[StepId]:
        """All of them, and the averaging."""
        return [one.id for one in self._under_way()]

    def slots(self, step: StepId) -> SlotBook | None:
        """The slots of `step`, if that is in progress. Others call it so, too."""
        return next((one.pipeline.slots for one in self._steps if step in (one.id, one.id.on_wire)), None)

    @property
    def occupation(self) -> Occupation:
        """What our worker does, or waits for."""
        if any(step.pipeline.running for step in self._steps):
            return Occupation.COMPUTES
        if any(step.pipeline.held_up for step in self._steps):
            return Occupation.ROOM
        return Occupation.DATA if any(step.reduction is None for step in self._steps) else Occupation.STEP

    def holds(self, commit: m.Commit) -> bool:
        """Whether we hold the gradients that `commit` names."""
        return any(one.matches(commit) for one in self._under_way())

    def _under_way(self) -> list[HeldStep]:
        return self._steps if self._round is None else [*self._steps, self._round]

    def works_on(self, step: StepId) -> bool:
        """Whether this step or averaging is in progress."""
        return self._in(step) is not None

    def _in(self, step: StepId) -> HeldStep | None:
        """The step or averaging in progress, if it is this one."""
        return next((one for one in self._under_way() if one.id == step), None)

    def _at_origin(self, origin: Origin) -> HeldStep | None:
        """The step or averaging in progress that `origin` is of."""
        return next((one for one in self._under_way() if one.is_at(origin.step)), None)

    def _drop_step(self, step: HeldStep) -> list[Effect]:
        self._steps.remove(step)
        return self._ended(step)

    def _drop_steps(self) -> list[Effect]:
        return [effect for step in list(self._steps) for effect in self._drop_step(step)]

    def _drop_round(self) -> list[Effect]:
        one, self._round = self._round, None
        return [] if one is None else self._ended(one)

    def _ended(self, held: HeldStep) -> list[Effect]:
        held.pipeline.over()
        self._lately = held.partners
        self._early.forget(held.id.on_wire)
        return [EndStep(held.id)]

    def _drop_all(self) -> list[Effect]:
        return [*self._drop_steps(), *self._drop_round()]

    def _needed(self, step: HeldStep) -> int:
        """The oldest version that is computed with when `step` has been applied."""
        later = [one.id.base for one in self._steps if one is not step]
        return min(later, default=step.id.number + 1)

    def _share_worker(self) -> list[Effect]:
        """What has happened in one step may make it another one's turn at the worker."""
        effects: list[Effect] = []
        for turn in self._bench.turns() if len(self._steps) > 1 else ():
            effects += next(one.absorb(one.pipeline.resume()) for one in self._steps if one.pipeline is turn)
        return effects

    # ── finished work ────────────────────────────────────────────────────────────────────────────────────────────

    def forward_done(
        self, step: StepId, key: TaskKey, output: Handle | None, loss: float | None
    ) -> list[Effect]:
        """`RunForward` is done."""
        held = self._in(step)
        if held is None:
            return [] if output is None else [Release(output)]
        return [*held.absorb(held.pipeline.forward_done(key, output, loss)), *self._share_worker()]

    def backward_done(self, step: StepId, key: TaskKey, input_gradient: Handle | None) -> list[Effect]:
        """`RunBackward` is done."""
        held = self._in(step)
        if held is None:
            return [] if input_gradient is None else [Release(input_gradient)]
        return [*held.absorb(held.pipeline.backward_done(key, input_gradient)), *self._share_worker()]

    def work_failed(self, step: StepId, key: TaskKey, why: str, given: str = "") -> list[Effect]:
        """`RunForward` or `RunBackward` could not be done, because of what the peer `given` had sent, if it is that."""
        held = self._in(step)
        if held is None:
            return []
        return [*held.absorb(held.pipeline.work_failed(key, why, given)), *self._share_worker()]

    def summed(
        self, step: StepId, shard: Shard, handle: Handle, lengths: Sequence[float] = ()
    ) -> list[Effect]:
        """`SumParts` is done; `lengths`: squared, of its parts, if they are fingerprinted."""
        held = self._in(step)
        return [Release(handle)] if held is None else held.summed(shard, handle, lengths)

    def unusable(self, step: StepId, shard: Shard, part: int, why: str) -> list[Effect]:
        """`SumParts` cannot be done: number `part` of its parts is no such thing."""
        held = self._in(step)
        return [] if held is None else held.unusable(shard, part, why)

    def inspected(
        self, step: StepId, plan: int, vote: m.BlockVote, gradient: Handle, looks: Sequence[Look] = ()
    ) -> list[Effect]:
        """`Inspect` is done; `looks`: at each piece, if that was asked for."""
        held = self._in(step)
        return [Release(gradient)] if held is None else held.inspected(plan, vote, gradient, looks)

    # ── links and tensors ────────────────────────────────────────────────────────────────────────────────────────

    def unreachable(self, peer: str) -> list[Effect]:
        """Our link to `peer` is down and could not be opened again."""
        sent = [effect for step in self._steps for effect in step.absorb(step.pipeline.unreachable(peer))]
        return [*sent, *self._share_worker()]

    def reachable(self, peer: str) -> None:
        """The link to `peer` is up again."""
        if peer not in self._shunned:
            for step in self._steps:
                step.pipeline.reachable(peer)

    def refused(self, peer: str, for_now: bool) -> list[Effect]:
        """We do not work with `peer` for now, whatever the step: its tasks go elsewhere. Or we do again."""
        if for_now:
            self._shunned.add(peer)
            return [*self._shuns(), *self.unreachable(peer)]
        self._shunned.discard(peer)
        self.reachable(peer)
        return self._shuns()

    def _shuns(self, *, again: bool = False) -> list[Effect]:
        """Whom of those who take part in what is under way we do not work with, if that has changed since the coordinator was told, or `again`. (Strangers that were turned away are
        nothing to it.)
        """
        if not self._steps:
            return []
        shunned = {peer for step in self._steps for peer in step.partners} & self._shunned
        if shunned == self._told_shunned and not (again and shunned):
            return []
        self._told_shunned = shunned
        return [Tell(m.Shuns(peers=tuple(sorted(shunned)[:MOST_SHUNNED])))]

    def congested(self, peer: str, blocks: int | None) -> list[Effect]:
        """Our link to `peer` takes no forwards with `blocks` or more of them left to the loss; None: it takes all."""
        effects: list[Effect] = []
        if blocks is None:
            self._congested.pop(peer, None)
        else:
            self._congested[peer] = blocks
        for step in self._steps:
            pipeline = step.pipeline
            effects += step.absorb(
                pipeline.relieved(peer) if blocks is None else pipeline.congested(peer, blocks)
            )
        return [*effects, *self._share_worker()]

    def introduced(self, origin: Origin, place: m.Range) -> list[Effect]:
        """`origin.sender` takes part in the step, as the coordinator's ticket says or we know: it gets what is left over for
        the blocks `place`.
        """
        step = self._at_origin(origin)
        if step is None:
            return []
        joined = step.joined(origin.sender, origin.incarnation, place)
        return [*joined, *self._shuns(), *self._replay_early()]

    def knows(self, origin: Origin) -> bool:
        """Whether `origin.sender` is known to take part in the step that it speaks of."""
        step = self._at_origin(origin)
        return step is not None and step.due(origin) is Due.NOW

    def leftovers(self) -> Mapping[int, tuple[int, ...]]:
        """Border → ids of the oldest step in progress whose bundles we keep for a holder that we do not know."""
        return self._steps[0].pipeline.leftovers() if self._steps else {}

    @property
    def is_idle(self) -> bool:
        """Whether a step is in progress, and nothing for us to do in the oldest one: we can take leftovers."""
        return bool(self._steps) and self._steps[0].reduction is None and self._steps[0].pipeline.idle

    def activation(self, origin: Origin, bundle: Bundle, handle: Handle) -> list[Effect]:
        """A bundle of activations from the hop before us."""

        def accept(step: HeldStep) -> list[Effect]:
            return step.activation(origin.sender, bundle, handle)

        return self._take(origin, handle, accept)

    def nudge(self, origin: Origin, microbatch: int, route: Route, attempt: int) -> list[Effect]:
        """An activation that comes again waits for credit; a task of ours that knows it need not wait."""
        step = self._at_origin(origin)
        if step is None or step.due(origin) is not Due.NOW:
            return []
        return [*step.nudge(origin.sender, microbatch, route, attempt), *self._share_worker()]

    def gradient(
        self, origin: Origin, microbatch: int, border: int, handle: Handle, check: int = 0
    ) -> list[Effect]:
        """The gradient of a bundle that we had sent over `border`; with `check` of one that was lent for that spot check."""

        def accept(step: HeldStep) -> list[Effect]:
            return step.gradient(origin.sender, microbatch, border, handle, check)

        return self._take(origin, handle, accept)

    def unread(self, origin: Origin, microbatch: int, border: int, why: str, *, back: bool) -> list[Effect]:
        """An activation over `border`, or the gradient that comes `back`, is none: `origin.sender` is named, and it is to come another way."""
        step = self._at_origin(origin)
        if step is None or step.due(origin) is not Due.NOW:
            return []
        return step.absorb(step.pipeline.unread(microbatch, border, origin.sender, why, back=back))

    def part(self, origin: Origin, block: int, index: int, handle: Handle) -> list[Effect]:
        """A holder's slot, one shard of it, for us to sum."""
        return self._take(origin, handle, lambda step: step.part(origin.sender, block, index, handle))

    def result(self, origin: Origin, block: int, index: int, handle: Handle, length: int) -> list[Effect]:
        """A reducer's sum of one shard, of `length` elements."""

        def accept(step: HeldStep) -> list[Effect]:
            return step.result(origin.sender, block, index, handle, length)

        return self._take(origin, handle, accept)

    def _take(
        self, origin: Origin, handle: Handle, accept: Callable[[HeldStep], list[Effect]]
    ) -> list[Effect]:
        step, partner = self._at_origin(origin), self._is_partner(origin.sender)
        if step is None:
            due = due_outside(origin, self.line, self.version, self._group, partner=partner)
        else:
            due = step.due(origin)
        if due is Due.NOW and step is not None:
            return [*accept(step), *self._share_worker()]
        if due is Due.NEVER:
            return [Release(handle)]
        dropped = self._early.hold(Waiting(origin, accept, handle, partner))
        return [] if dropped is None else [Release(dropped.handle)]

    def _is_partner(self, peer: str) -> bool:
        """Whether `peer` takes part in what is under way, or did in what ended last."""
        return peer in self._lately or any(peer in one.partners for one in self._under_way())

    def _replay_early(self) -> list[Effect]:
        """What waited for the message that has just been handled; the rest goes on waiting or is released."""
        return [
            effect
            for tensor in self._early.take()
            for effect in self._take(tensor.origin, tensor.handle, tensor.accept)
        ]
