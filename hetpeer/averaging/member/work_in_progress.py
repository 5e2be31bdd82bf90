"""The steps that a volunteer works on: finished work, links and tensors come here, from the worker and from
peers.

Pure. Every event names its step; events of a step that is not in progress release their tensor and change
nothing. Several steps are in progress where steps overlap (docs/asynchronous.md). Shunned peers and congested
links outlive a step. Messages of the coordinator come to member.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import Effect, EndStep, Look, Shard, SlotSum, StepId, Tell
from hetpeer.averaging.member.held_step import Bundle, HeldStep
from hetpeer.averaging.member.position import Due, EarlyTensor, EarlyTensors, Origin, Position, due_outside
from hetpeer.stages.block.rounding import UNMEASURED, Rounding
from hetpeer.stages.pipeline.effects import Handle, Release, TaskKey
from hetpeer.stages.pipeline.gradient_slots import GradientSlots
from hetpeer.stages.pipeline.routes import Route
from hetpeer.stages.pipeline.schedule_1f1b import InFlightWindow, WorkerQueue

MOST_SHUNNED = 256
"""Peers that one `Shuns` names at most."""


class WorkerOccupation(enum.Enum):
    """Occupation of a worker at one time."""

    COMPUTES = "computes"
    ROOM = "room"
    """Work is ready, but there is no room for its result: in a slot, in memory, or at the next peer."""
    DATA = "data"
    """The next input is computed elsewhere, or on its way."""
    STEP = "step"
    """All work that has begun is done: a reduce, a vote, a commit or another peer is waited for."""


class WorkInProgress:
    """The steps in progress, and an averaging beside them.

    `window` limits the microbatches in flight, counted over all steps together.
    """

    def __init__(self, position: Position, window: InFlightWindow | None) -> None:
        self.worker_queue = WorkerQueue(window)
        """The order in which the steps use the worker, and the window that they share."""
        self.steps: list[HeldStep] = []
        """Steps in progress, oldest first: the first is the next to be committed."""
        self.averaging: HeldStep | None = None
        """Averaging of parameters; a delayed one runs beside steps."""
        self.shunned: set[str] = set()
        """Peers that have offended too often: we exchange no tensors with them for now, whatever the step."""
        self._congested: dict[str, int] = {}
        """Peer → number of blocks left to the loss from which on its link takes no forwards."""
        self._told: set[str] = set()
        """Shunned partners that the coordinator knows of."""
        self._position = position
        self._early = EarlyTensors()
        self._lately: frozenset[str] = frozenset()
        """Partners of the step that ended last."""

    # ── what is in progress ─────────────────────────────────────────────────────────────────────────────────

    def _all(self) -> list[HeldStep]:
        return self.steps if self.averaging is None else [*self.steps, self.averaging]

    @property
    def step(self) -> StepId | None:
        """The oldest step in progress, or the averaging if there is none."""
        return next((one.id for one in self._all()), None)

    @property
    def ids(self) -> list[StepId]:
        """All steps in progress, then the averaging."""
        return [one.id for one in self._all()]

    @property
    def partners(self) -> frozenset[str]:
        """Volunteers that take part in the oldest step in progress, as far as we know."""
        return next((one.partners for one in self._all()), frozenset())

    @property
    def place(self) -> m.Range | None:
        """Blocks [begin, end) that we hold."""
        return self._position.place

    @property
    def occupation(self) -> WorkerOccupation:
        """Occupation of the worker now."""
        if any(step.pipeline.schedule.running for step in self.steps):
            return WorkerOccupation.COMPUTES
        if any(step.pipeline.held_up for step in self.steps):
            return WorkerOccupation.ROOM
        return (
            WorkerOccupation.DATA
            if any(step.vote.reduction is None for step in self.steps)
            else WorkerOccupation.STEP
        )

    @property
    def is_idle(self) -> bool:
        """Whether a step is in progress and we are idle in the oldest one: we can take leftovers."""
        oldest = self.steps[0] if self.steps else None
        return oldest is not None and oldest.vote.reduction is None and oldest.pipeline.idle

    def leftovers(self) -> Mapping[int, tuple[int, ...]]:
        """Block → ids of the oldest step whose bundles that enter it are kept here without a known holder."""
        return self.steps[0].pipeline.outputs.leftovers() if self.steps else {}

    def slots(self, step: StepId) -> GradientSlots | None:
        """The gradient slots of `step`, by our name for it or by others'; None if it is not in progress."""
        return next((one.pipeline.slots for one in self.steps if step in (one.id, one.wire_id)), None)

    def weights(self, step: StepId) -> Sequence[float]:
        """Weight of each training microbatch of `step` in its mean loss; empty: its samples."""
        found = self.find(step)
        return () if found is None else found.weights

    def works_on(self, step: StepId) -> bool:
        """Whether this step or averaging is in progress."""
        return self.find(step) is not None

    def holds(self, commit: m.Commit) -> bool:
        """Whether we hold the gradients that `commit` names."""
        return any(one.vote.matches(commit) for one in self._all())

    def find(self, step: StepId) -> HeldStep | None:
        """The step or averaging in progress with this id."""
        return next((one for one in self._all() if one.id == step), None)

    def at_origin(self, origin: Origin) -> HeldStep | None:
        """The step or averaging in progress to which a tensor from `origin` belongs."""
        return next((one for one in self._all() if one.wire_id == origin.step), None)

    def numbered(self, number: int) -> HeldStep | None:
        """The step in progress that has this number."""
        return next((step for step in self.steps if step.id.number == number), None)

    def named(self, message: m.Plan | m.Commit) -> HeldStep | None:
        """The step or averaging in progress to which `message` belongs."""
        if not message.group:
            return self.numbered(message.step)
        return self.averaging if self.averaging and self.averaging.id.group == message.group else None

    # ── for member.py ───────────────────────────────────────────────────────────────────────────────────────

    def begin(self, step: HeldStep) -> None:
        """`step` begins, with the links as they are."""
        for peer in self.shunned:
            step.pipeline.unreachable(peer)
        for peer, blocks in self._congested.items():
            step.pipeline.congested(peer, blocks)
        self.steps.append(step)

    def drop_step(self, step: HeldStep) -> list[Effect]:
        """End `step`."""
        self.steps.remove(step)
        return self._ended(step)

    def drop_steps(self, last: int | None = None) -> list[Effect]:
        """End all steps, up to number `last` if given; an averaging goes on."""
        over = [step for step in self.steps if last is None or step.id.number <= last]
        return [effect for step in over for effect in self.drop_step(step)]

    def drop_averaging(self) -> list[Effect]:
        """End the averaging, if there is one."""
        one, self.averaging = self.averaging, None
        return [] if one is None else self._ended(one)

    def drop_all(self) -> list[Effect]:
        """End all steps and the averaging."""
        return [*self.drop_steps(), *self.drop_averaging()]

    def _ended(self, held: HeldStep) -> list[Effect]:
        held.pipeline.schedule.leave()
        self._lately = held.partners
        self._early.forget(held.wire_id)
        return [EndStep(held.id)]

    def oldest_base_after(self, held: HeldStep, number: int) -> int:
        """The oldest version that is computed with once `held` has been applied as step `number`."""
        later = [one.id.base for one in self.steps if one is not held]
        return min(later, default=number + 1)

    def share_worker(self) -> list[Effect]:
        """Start the work that the steps in progress may give to the worker now.

        Called after every event: it may free the worker, or room in the shared window, for another step
        than its own. A single step has dispatched its work itself.
        """
        effects: list[Effect] = []
        for schedule in self.worker_queue.turns() if len(self.steps) > 1 else ():
            step = next(held for held in self.steps if held.pipeline.schedule is schedule)
            effects += step.absorb(step.pipeline.dispatch())
        return effects

    def tell_shunned(self, *, again: bool = False) -> list[Effect]:
        """Name shunned partners to the coordinator, if they have changed since it was told, or `again`.

        Strangers that were turned away are of no interest to it.
        """
        if not self.steps:
            return []
        shunned = self.shunned.intersection(peer for step in self.steps for peer in step.partners)
        if shunned == self._told and not (again and shunned):
            return []
        self._told = shunned
        return [Tell(m.Shuns(peers=tuple(sorted(shunned)[:MOST_SHUNNED])))]

    def replay_early(self) -> list[Effect]:
        """Take the tensors that waited for the message just handled; others wait on, or are released."""
        return [
            effect
            for tensor in self._early.take()
            for effect in self._take(tensor.origin, tensor.handle, tensor.accept)
        ]

    # ── finished work ───────────────────────────────────────────────────────────────────────────────────────

    def forward_done(
        self,
        step: StepId,
        key: TaskKey,
        output: Handle | None,
        loss: float | None,
        hits: tuple[int, int] | None = None,
    ) -> list[Effect]:
        """Pass the result of `RunForward` on; release it if the step is over."""
        held = self.find(step)
        if held is None:
            return [] if output is None else [Release(output)]
        return [*held.absorb(held.pipeline.forward_done(key, output, loss, hits)), *self.share_worker()]

    def backward_done(
        self, step: StepId, key: TaskKey, input_gradient: Handle | None, rounding: Rounding = UNMEASURED
    ) -> list[Effect]:
        """Pass the result of `RunBackward` on; release it if the step is over."""
        held = self.find(step)
        if held is None:
            return [] if input_gradient is None else [Release(input_gradient)]
        done = held.pipeline.backward_done(key, input_gradient, rounding)
        return [*held.absorb(done), *self.share_worker()]

    def work_failed(self, step: StepId, key: TaskKey, why: str, given: str = "") -> list[Effect]:
        """Note that `RunForward` or `RunBackward` failed; `given`: peer whose tensor caused it, if any."""
        held = self.find(step)
        if held is None:
            return []
        return [*held.absorb(held.pipeline.work_failed(key, why, given)), *self.share_worker()]

    def summed(
        self,
        step: StepId,
        shard: Shard,
        handle: Handle,
        lengths: Sequence[float] = (),
        looks: Sequence[Look] = (),
    ) -> list[Effect]:
        """Take the result of `SumParts`; `lengths`: squared lengths of its parts, if fingerprinted; `looks`:
        their inspections, if asked for.
        """
        held = self.find(step)
        return [Release(handle)] if held is None else held.vote.summed(shard, handle, lengths, looks)

    def unusable(self, step: StepId, shard: Shard, part: int, why: str) -> list[Effect]:
        """Note that `SumParts` failed: part number `part` is malformed or not finite."""
        held = self.find(step)
        return [] if held is None else held.vote.unusable(shard, part, why)

    def inspected(
        self,
        step: StepId,
        plan: int,
        vote: m.BlockVote,
        gradient: Handle | SlotSum,
        looks: Sequence[Look] = (),
    ) -> list[Effect]:
        """Take the result of `Inspect` or `InspectSlot`; `looks`: one for each piece, if asked for."""
        held = self.find(step)
        if held is None:
            return [] if isinstance(gradient, SlotSum) else [Release(gradient)]
        return held.vote.inspected(plan, vote, gradient, looks)

    # ── links ───────────────────────────────────────────────────────────────────────────────────────────────

    def unreachable(self, peer: str) -> list[Effect]:
        """Our link to `peer` is down and could not be opened again."""
        sent = [effect for step in self.steps for effect in step.absorb(step.pipeline.unreachable(peer))]
        return [*sent, *self.share_worker()]

    def reachable(self, peer: str) -> None:
        """The link to `peer` is up again."""
        if peer not in self.shunned:
            for step in self.steps:
                step.pipeline.outputs.reachable(peer)

    def refused(self, peer: str, for_now: bool) -> list[Effect]:
        """Shun `peer` `for_now`, whatever the step: its tasks go elsewhere. Or accept it again."""
        if for_now:
            self.shunned.add(peer)
            return [*self.tell_shunned(), *self.unreachable(peer)]
        self.shunned.discard(peer)
        self.reachable(peer)
        return self.tell_shunned()

    def congested(self, peer: str, blocks: int | None) -> list[Effect]:
        """Our link to `peer` takes no forwards with `blocks` or more left to the loss; None: it takes all."""
        effects: list[Effect] = []
        if blocks is None:
            self._congested.pop(peer, None)
        else:
            self._congested[peer] = blocks
        for step in self.steps:
            effects += step.absorb(step.pipeline.congested(peer, blocks))
        return [*effects, *self.share_worker()]

    def introduced(self, origin: Origin, place: m.Range) -> list[Effect]:
        """`origin.sender` takes part in the step with the blocks `place`: it gets the leftovers for them.

        The driver has checked its ticket, or `knows` it.
        """
        step = self.at_origin(origin)
        if step is None:
            return []
        joined = step.joined(origin.sender, origin.incarnation, place)
        return [*joined, *self.tell_shunned(), *self.replay_early()]

    def knows(self, origin: Origin) -> bool:
        """Whether `origin.sender` is known to take part in the step that it speaks of."""
        step = self.at_origin(origin)
        return step is not None and step.due(origin) is Due.NOW

    # ── tensors ─────────────────────────────────────────────────────────────────────────────────────────────

    def activation(self, origin: Origin, bundle: Bundle, handle: Handle) -> list[Effect]:
        """A bundle of activations from the hop before us."""
        return self._take(origin, handle, lambda step: step.activation(origin.sender, bundle, handle))

    def nudge(self, origin: Origin, microbatch: int, route: Route, attempt: int) -> list[Effect]:
        """Answer the head of an activation that is sent again, whose bundle waits for a grant."""
        step = self.at_origin(origin)
        if step is None or step.due(origin) is not Due.NOW:
            return []
        pipeline = step.pipeline
        nudged = step.absorb(pipeline.nudge(microbatch, route, attempt, origin.sender))
        return [*nudged, *self.share_worker()]

    def gradient(
        self, origin: Origin, microbatch: int, border: int, handle: Handle, check: int = 0
    ) -> list[Effect]:
        """The gradient of a bundle that we sent over `border`; with `check`, of one lent for that check."""
        return self._take(
            origin, handle, lambda step: step.gradient(origin.sender, microbatch, border, handle, check)
        )

    def unread(self, origin: Origin, microbatch: int, border: int, why: str, *, back: bool) -> list[Effect]:
        """An activation over `border`, or a gradient that comes `back`, is malformed: `origin.sender` is
        named.

        The microbatch is computed another way.
        """
        step = self.at_origin(origin)
        if step is None or step.due(origin) is not Due.NOW:
            return []
        return step.absorb(step.pipeline.unread(microbatch, border, origin.sender, why, back=back))

    def part(self, origin: Origin, block: int, index: int, handle: Handle) -> list[Effect]:
        """One shard of a holder's slot, for us to add up."""
        return self._take(origin, handle, lambda step: step.vote.part(origin.sender, block, index, handle))

    def result(self, origin: Origin, block: int, index: int, handle: Handle, length: int) -> list[Effect]:
        """A reducer's sum of one shard of `length` elements."""
        return self._take(
            origin, handle, lambda step: step.vote.result(origin.sender, block, index, handle, length)
        )

    def _take(
        self, origin: Origin, handle: Handle, accept: Callable[[HeldStep], list[Effect]]
    ) -> list[Effect]:
        """Give a tensor to its step by `accept`, hold it until its step begins, or release it."""
        step = self.at_origin(origin)
        due = None if step is None else step.due(origin)
        if step is not None and due is Due.NOW:
            return [*accept(step), *self.share_worker()]
        partner = self._is_partner(origin.sender)
        if due is None:
            due = due_outside(origin, self._position, partner=partner)
        if due is Due.NEVER:
            return [Release(handle)]
        dropped = self._early.hold(EarlyTensor(origin, accept, handle, partner))
        return [] if dropped is None else [Release(dropped.handle)]

    def _is_partner(self, peer: str) -> bool:
        """Whether `peer` takes part in a step in progress, or did in the one that ended last."""
        return peer in self._lately or any(peer in one.partners for one in self._all())
