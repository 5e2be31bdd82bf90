"""One step at one holder, from Begin to the applied update: its tasks, and then its reduce, vote and update.

Pure. Ties the pipeline of tasks to the messages of the coordinator; step_vote.py has the reduce, the vote and
the update. The caller refuses messages and tensors of another term-view or step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import (
    Effect,
    InStep,
    ShowMarks,
    StepId,
    Tell,
    TestifyParts,
)
from hetpeer.averaging.member.position import Due, Origin
from hetpeer.averaging.member.step_vote import ModelShape, StepVote
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.pipeline import Pipeline
from hetpeer.stages.pipeline.routes import Hop, Route
from hetpeer.stages.pipeline.schedule_1f1b import WorkerQueue


@dataclass(frozen=True, slots=True)
class Bundle:
    """Head of an activation: `route` begins with our own hop."""

    id: int
    route: Route
    attempt: int
    check: int = 0
    """Number of the spot check for which it is computed once more; 0: it is computed for the step itself."""
    asks: bool = False
    """The sender computed this for a check: compare it with what we got before, and resend the gradient."""


class HeldStep:
    """The step that `begin` names, at holder `me` of the blocks `place`.

    `shape`: what the manifest says of the model; `worker_queue`: the worker's room, which the steps in
    progress share.
    """

    def __init__(
        self, me: str, place: m.Range, begin: m.Begin, shape: ModelShape, worker_queue: WorkerQueue
    ) -> None:
        delays, behind = shape.delays, begin.behind
        self.id = StepId(begin.line, begin.step, begin.entry, begin.batch, begin.group, behind, delays)
        self.wire_id = self.id.on_wire
        """The step as others name it."""
        self.delayed = begin.delayed
        self.weights = begin.weights
        """Weight of each training microbatch in the mean loss; empty: its samples."""
        self.pipeline = Pipeline(
            me, begin.roster, begin.microbatches, shape.slot_capacity, worker_queue, behind, delays
        )
        self.vote = StepVote(me, place, self.id, shape, self.pipeline.slots, delayed=begin.delayed)
        self._me = me
        self._place = place
        self._incarnations = dict(begin.incarnations)
        self._left: dict[str, int] = {}
        """Peer that left the step → its incarnation then."""

    @property
    def partners(self) -> frozenset[str]:
        """Volunteers that take part in the step, as far as we know."""
        return frozenset(self._incarnations)

    def due(self, origin: Origin) -> Due:
        """Decision on a tensor of this step. A sender not in the roster may be about to introduce itself."""
        known = self._incarnations.get(origin.sender)
        if known is None:
            return Due.LATER if origin.incarnation >= self._left.get(origin.sender, 0) else Due.NEVER
        if known != origin.incarnation:
            return Due.NEVER
        plan = None if self.vote.reduction is None else self.vote.reduction.number
        if origin.plan is None or origin.plan == plan:
            return Due.NOW
        return Due.LATER if plan is None or origin.plan > plan else Due.NEVER

    def advance(self, version: int) -> list[Effect]:
        """Note that our blocks are at `version` now: less is missing before this step."""
        return self.absorb(self.pipeline.advance(self.id.number - version))

    def apply(self, commit: m.Commit, oldest: int) -> list[Effect]:
        """Apply the decided update, which `vote.matches`; versions from `oldest` on are still needed."""
        self.pipeline.schedule.close()
        return self.vote.apply(commit, oldest)

    # ── what the coordinator says ───────────────────────────────────────────────────────────────────────────

    def receive(self, message: m.InStep) -> list[Effect]:
        """A message of the coordinator on this step."""
        match message:
            case m.Check(check=number, tasks=tasks):
                known = (
                    self.pipeline.check(t.id, t.route, number) for t in tasks if self._can_check(t.route)
                )
                return [effect for effects in known for effect in self.absorb(effects)]
            case m.Show():
                return [InStep(self.id, ShowMarks(message))]
            case m.Prove():
                return self.vote.prove(message)
            case m.Testify():
                return [InStep(self.id, TestifyParts(message))]
            case m.Reroute(tasks=()):
                return self.absorb(self.pipeline.urge())
            case m.Reroute(tasks=tasks):
                return self.assign(tasks)
            case m.Joined(entrants=entrants):
                others = [one for one in entrants if one.peer != self._me]
                return [
                    effect
                    for one in others
                    for effect in self.joined(one.peer, one.incarnation, (one.begin, one.end))
                ]
            case m.Settled(slot=slot, refused=refused):
                return self._with_slots(self.pipeline.settled(slot, refused))
            case m.Evict(blocks=blocks):
                return self._with_slots(self.pipeline.evict(blocks))

    def _with_slots(self, effects: Sequence[p.Effect]) -> list[Effect]:
        """`effects` of the pipeline, which may change slots that the reduce has looked at."""
        self.vote.slots_changed(effects)
        return self.absorb(effects)

    def assign(self, tasks: Iterable[m.Task]) -> list[Effect]:
        """Microbatches whose first hop we are."""
        return [e for t in tasks for e in self.absorb(self.pipeline.assign(t.id, t.route, t.attempt))]

    def drop_peers(self, peers: Iterable[str]) -> list[Effect]:
        """Ignore the tensors of volunteers that left the roster."""
        effects: list[Effect] = []
        for peer in peers:
            if (incarnation := self._incarnations.pop(peer, None)) is not None:
                self._left[peer] = incarnation
            effects += self.absorb(self.pipeline.gone(peer))
        return effects

    def joined(self, peer: str, incarnation: int, place: m.Range) -> list[Effect]:
        """`peer` came into the step while it ran. An incarnation that has left it before is ignored."""
        if incarnation < self._left.get(peer, 0):
            return []
        self._incarnations[peer] = incarnation
        return self.absorb(self.pipeline.outputs.joined(peer, place))

    # ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────

    def activation(self, sender: str, bundle: Bundle, handle: p.Handle) -> list[Effect]:
        """A bundle from the hop before us; it is released if its route is not ours to run."""
        route, pipeline = bundle.route, self.pipeline
        if not self._can_run(route[0]):
            return [p.Release(handle)]
        if bundle.asks:
            return self.absorb(
                pipeline.recomputations.answer(bundle.id, route[0].begin, sender, handle, bundle.check)
            )
        return self.absorb(
            pipeline.activation(bundle.id, route, bundle.attempt, sender, handle, bundle.check)
        )

    def gradient(
        self, sender: str, microbatch: int, border: int, handle: p.Handle, check: int
    ) -> list[Effect]:
        """The gradient of a bundle that we sent over `border`; with `check`, of one lent for that check."""
        pipeline = self.pipeline
        if check:
            return self.absorb(pipeline.recomputations.returned(microbatch, border, sender, handle, check))
        return self.absorb(pipeline.gradient(microbatch, border, handle))

    def _can_run(self, hop: Hop) -> bool:
        return hop.peer == self._me and self._place[0] <= hop.begin < hop.end <= self._place[1]

    def _can_check(self, route: Route) -> bool:
        """Whether a spot check's route can begin as it says: one that begins with the data begins here."""
        return route[0].begin > 0 or self._can_run(route[0])

    def absorb(self, effects: Sequence[p.Effect]) -> list[Effect]:
        """Turn the pipeline's reports into messages; everything else goes to the driver as it is."""
        return [self._report(effect) for effect in effects]

    def _report(self, effect: p.Effect) -> Effect:
        """`effect` of the pipeline as the step's own effect: reports become messages to the coordinator."""
        line, number = self.id.line, self.id.number
        match effect:
            case p.ReportSealed(slot, ids, losses):
                contents = tuple(_ranges(ids))
                return Tell(m.Sealed(line=line, step=number, slot=slot, contents=contents, losses=losses))
            case p.ReportEvaluated(microbatch, loss, hits):
                counted = {} if hits is None else {microbatch: hits}
                return Tell(m.Evaluated(line=line, step=number, losses={microbatch: loss}, hits=counted))
            case p.ReportChecked(key, rounding):
                done = m.Checked(
                    line=line,
                    step=number,
                    check=key.check,
                    id=key.id,
                    begin=key.begin,
                    output=rounding.output,
                    gradient=rounding.gradient,
                    sums=rounding.sums,
                )
                return Tell(done)
            case p.ReportFailed(microbatch, why, given):
                return Tell(m.Failed(line=line, step=number, id=microbatch, why=why[:500], given=given))
            case _:
                return InStep(self.id, effect)


def _ranges(ids: Mapping[int, tuple[int, ...]]) -> list[m.Contents]:
    """Ids per block, with neighbouring blocks that hold the same ids joined."""
    result: list[m.Contents] = []
    for block, held in sorted(ids.items()):
        last = result[-1] if result else None
        if last is not None and last.end == block and last.ids == held:
            result[-1] = last.model_copy(update={"end": block + 1})
        else:
            result.append(m.Contents(begin=block, end=block + 1, ids=held))
    return result
