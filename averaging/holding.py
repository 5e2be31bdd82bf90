"""One step at one holder: its tasks, its part in the reduce, its vote and the update.

Pure. Ties the pipeline of tasks and the reduction of the current plan to the messages of the coordinator. A `HeldStep`
lives from Begin to the applied update; what a step of another (line, number) has to say is the caller's to refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.early import Due, Origin, due_in_step
from hetpeer.averaging.effects import (
    COPY,
    STATE,
    ApplyUpdate,
    Effect,
    InstallAverage,
    InStep,
    KeepCopy,
    RecordApplied,
    Shard,
    ShareUplink,
    ShowMarks,
    StepEffect,
    StepId,
    Tell,
)
from hetpeer.averaging.reduction import LENGTH, Reduction
from hetpeer.averaging.ties import Ties
from hetpeer.stages.execution import effects as p
from hetpeer.stages.execution.bench import Bench
from hetpeer.stages.execution.pipeline import Pipeline
from hetpeer.stages.execution.routes import Hop, Route


@dataclass(frozen=True, slots=True)
class Shape:
    """What a member must know of the model."""

    sizes: Mapping[int, int]
    """Block -> elements of its flat vector (parameters, then statistics)."""
    slot_capacity: int
    """S of docs/protocol.md: microbatches a slot may hold."""
    ties: Ties = field(default_factory=Ties)
    shard_length: int = LENGTH


@dataclass(frozen=True, slots=True)
class Bundle:
    """What the head of a bundle says of it: `route` begins with our own hop."""

    id: int
    route: Route
    attempt: int
    check: int = 0
    """Above 0: it is to be computed once more, for that spot check."""
    asks: bool = False
    """We have computed what somebody else had sent, and are to compare the two and give the gradient once more."""


class HeldStep:
    """The step that `begin` names, at holder `me` of the blocks `place`.

    `shape`: what the manifest says of the model's vectors and slots; `bench`: the worker's room, which the steps under way share.
    """

    def __init__(self, me: str, place: m.Range, begin: m.Begin, shape: Shape, bench: Bench) -> None:
        self.id = StepId(begin.line, begin.step, begin.entry, begin.batch, begin.group, begin.behind)
        self.pipeline = Pipeline(me, begin.roster, begin.microbatches, shape.slot_capacity, bench)
        self.reduction: Reduction | None = None
        self.commit: m.Commit | None = None
        self.delayed = begin.delayed
        self._me = me
        self._place = place
        self._shape = shape
        self._incarnations = dict(begin.incarnations)
        self._gone: dict[str, int] = {}
        """Who left the step → its incarnation then."""
        self._applied: dict[int, str] = {}

    def due(self, origin: Origin) -> Due:
        """When a tensor of this step is to be taken."""
        plan = None if self.reduction is None else self.reduction.number
        return due_in_step(origin, self._incarnations, self._gone, plan)

    def is_at(self, step: StepId) -> bool:
        """Whether `step`, as others name it, is this one."""
        return self.id.on_wire == step

    @property
    def averages(self) -> bool:
        """Whether parameters are averaged in it, and nothing is trained."""
        return self.id.group > 0

    def start(self) -> list[Effect]:
        """What is averaged beside other steps is kept as it is now."""
        return self._wrap([KeepCopy(block) for block in self._blocks]) if self.delayed else []

    # ── what the coordinator says ────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: m.Reroute | m.Joined | m.Settled | m.Evict | m.Check | m.Show) -> list[Effect]:
        """A word on this step while its microbatches are computed."""
        match message:
            case m.Check(check=number, tasks=tasks):
                known = (self.pipeline.check(t.id, t.route, number) for t in tasks if self._concerns(t.route))
                return [effect for effects in known for effect in self.absorb(effects)]
            case m.Show():
                return self._wrap([ShowMarks(message)])
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
                return self.absorb(self.pipeline.settled(slot, refused))
            case m.Evict(blocks=blocks):
                return self.absorb(self.pipeline.evict(blocks))

    def _concerns(self, route: Route) -> bool:
        """Whether a spot check's route can begin as it says: with the data it begins here."""
        return route[0].begin > 0 or self._can_run(route[0])

    def assign(self, tasks: Iterable[m.Task]) -> list[Effect]:
        """Microbatches whose first hop we are."""
        return [e for t in tasks for e in self.absorb(self.pipeline.assign(t.id, t.route, t.attempt))]

    def gone(self, peers: Iterable[str]) -> list[Effect]:
        """These left the roster: their tensors are ignored from now on."""
        effects: list[Effect] = []
        for peer in peers:
            if (incarnation := self._incarnations.pop(peer, None)) is not None:
                self._gone[peer] = incarnation
            effects += self.absorb(self.pipeline.gone(peer))
        return effects

    def joined(self, peer: str, incarnation: int, place: m.Range) -> list[Effect]:
        """`peer` came into the step while it ran. An incarnation that has left it before is another's late word."""
        if incarnation < self._gone.get(peer, 0):
            return []
        self._incarnations[peer] = incarnation
        return self.absorb(self.pipeline.joined(peer, place))

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────

    def activation(self, sender: str, bundle: Bundle, handle: p.Handle) -> list[Effect]:
        """A bundle from the hop before us; a route that is not ours to run is refused."""
        route, pipeline = bundle.route, self.pipeline
        if not self._can_run(route[0]):
            return [p.Release(handle)]
        if bundle.asks:
            return self.absorb(pipeline.asked(bundle.id, route[0].begin, sender, handle, bundle.check))
        return self.absorb(
            pipeline.activation(bundle.id, route, bundle.attempt, sender, handle, bundle.check)
        )

    def nudge(self, sender: str, microbatch: int, route: Route, attempt: int) -> list[Effect]:
        """A bundle for us waits at the hop before us."""
        return self.absorb(self.pipeline.nudge(microbatch, route, attempt, sender))

    def gradient(
        self, sender: str, microbatch: int, border: int, handle: p.Handle, check: int
    ) -> list[Effect]:
        """The gradient of a bundle that we had sent over `border`; with `check` of one that we have lent."""
        pipeline = self.pipeline
        if check:
            return self.absorb(pipeline.returned(microbatch, border, sender, handle, check))
        return self.absorb(pipeline.gradient(microbatch, border, handle))

    def _can_run(self, hop: Hop) -> bool:
        return hop.peer == self._me and self._place[0] <= hop.begin < hop.end <= self._place[1]

    def absorb(self, effects: Sequence[p.Effect]) -> list[Effect]:
        """Turn the pipeline's reports into messages; everything else goes to the driver as it is."""
        return [self._report(effect) for effect in effects]

    def _report(self, effect: p.Effect) -> Effect:
        line, number = self.id.line, self.id.number
        match effect:
            case p.ReportSealed(slot, ids, losses):
                contents = tuple(_ranges(ids))
                return Tell(m.Sealed(line=line, step=number, slot=slot, contents=contents, losses=losses))
            case p.ReportEvaluated(microbatch, loss):
                return Tell(m.Evaluated(line=line, step=number, losses={microbatch: loss}))
            case p.ReportChecked(key):
                done = m.Checked(line=line, step=number, check=key.check, id=key.id, begin=key.begin)
                return Tell(done)
            case p.ReportFailed(microbatch, why, given):
                return Tell(m.Failed(line=line, step=number, id=microbatch, why=why[:500], given=given))
            case _:
                return InStep(self.id, effect)

    def links(self, away: Iterable[str], congested: Mapping[str, int]) -> None:
        """How our links are when the step begins."""
        for peer in away:
            self.pipeline.unreachable(peer)
        for peer, blocks in congested.items():
            self.pipeline.congested(peer, blocks)

    # ── reduce and vote ──────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, message: m.Plan) -> list[Effect]:
        """Take part in a plan; a higher one voids the one before. Nothing for one that we know already."""
        if self.reduction is not None and message.plan <= self.reduction.number:
            return []
        void = [] if self.reduction is None else self.reduction.abandon()
        # copies of a tied parameter are averaged each: they are alike, and stay so
        ties = Ties() if self.averages else self._shape.ties
        self.reduction = Reduction(self._me, message, self._shape.sizes, ties, self._shape.shard_length)
        outgoing = self.reduction.outgoing()
        shared = [ShareUplink(outgoing)] if outgoing else []
        return self._wrap([*void, *shared, *self.reduction.start(*self._sums())])

    def _sums(self) -> tuple[int | None, Mapping[int, frozenset[int]]]:
        """What we have to send: a slot, and the ids in it per block. In an averaging the clusters are the ids."""
        if self.averages:
            return COPY if self.delayed else STATE, dict.fromkeys(
                self._blocks, frozenset((self.id.line.cluster,))
            )
        slots = self.pipeline.slots
        slot = slots.accepted()
        return slot, {} if slot is None else slots.contents()[slot]

    def part(self, sender: str, block: int, index: int, handle: p.Handle) -> list[Effect]:
        """A holder's slot, one shard of it, for us to sum under the current plan."""
        assert self.reduction is not None
        return [*self._wrap(self.reduction.part(block, index, sender, handle)), *self._news()]

    def result(self, sender: str, block: int, index: int, handle: p.Handle) -> list[Effect]:
        """A reducer's sum of one shard under the current plan."""
        assert self.reduction is not None
        return [*self._wrap(self.reduction.result(block, index, sender, handle)), *self._news()]

    def _news(self) -> list[Effect]:
        """A reduce that takes long is not to be given up while it goes on."""
        assert self.reduction is not None
        if not self.reduction.has_news():
            return []
        return [Tell(m.Reducing(**self._named, plan=self.reduction.number))]

    def summed(self, shard: Shard, handle: p.Handle) -> list[Effect]:
        """`SumParts` is done."""
        if not self._is_current(shard.plan):
            return [p.Release(handle)]
        assert self.reduction is not None
        return self._wrap(self.reduction.summed(shard, handle))

    def unusable(self, shard: Shard, part: int, why: str) -> list[Effect]:
        """`SumParts` cannot be done: whose fault it is."""
        if not self._is_current(shard.plan):
            return []
        assert self.reduction is not None
        holder, _ = self.reduction.covers[shard.block].slots[part]
        objection = m.Objection(**self._named, plan=shard.plan, block=shard.block, peer=holder, why=why[:500])
        return [Tell(objection)]

    def inspected(self, plan: int, vote: m.BlockVote, gradient: p.Handle) -> list[Effect]:
        """`Inspect` is done; after the last of our blocks we vote."""
        if not self._is_current(plan):
            return [p.Release(gradient)]
        assert self.reduction is not None
        self.reduction.inspected(vote, gradient)
        if not self.reduction.complete:
            return []
        votes = tuple(self.reduction.votes[b] for b in sorted(self.reduction.votes))
        return [Tell(m.Vote(**self._named, plan=plan, blocks=votes))]

    @property
    def _named(self) -> dict[str, Any]:
        """The step or averaging in a message."""
        return {"line": self.id.line, "step": self.id.number, "group": self.id.group}

    def _is_current(self, plan: int) -> bool:
        return self.reduction is not None and self.reduction.number == plan

    # ── apply ────────────────────────────────────────────────────────────────────────────────────────────────────

    def matches(self, commit: m.Commit) -> bool:
        """Whether `commit` decides this very step, and the gradients that we hold are those that it names."""
        return (
            (self.id.line, self.id.group) == (commit.line, commit.group)
            and (self.averages or self.id.number == commit.step)
            and self._is_current(commit.plan)
            and self.reduction is not None
            and self.reduction.matches(commit.digests, self._blocks)
        )

    def apply(self, commit: m.Commit, needed: int) -> list[Effect]:
        """The step is decided, and `matches` holds. Versions from `needed` on are still computed with."""
        assert self.reduction is not None
        self.commit = commit
        self.pipeline.decided()
        gradients = self.reduction.gradients
        if self.averages:
            return self._wrap(
                [
                    InstallAverage(b, commit.plan, commit.step, gradients[b], commit.coefficient)
                    for b in self._blocks
                ]
            )
        one = (commit.coefficient, needed, commit.workers)
        return self._wrap([ApplyUpdate(b, commit.plan, gradients[b], *one) for b in self._blocks])

    def applied(self, block: int, digest: str) -> RecordApplied | None:
        """`ApplyUpdate` or `InstallAverage` is done; after the last block, what there is to be written down."""
        if self.commit is None or self.reduction is None:
            return None
        self._applied[block] = digest
        if len(self._applied) < len(self._blocks):
            return None
        return RecordApplied(
            step=self.id._replace(number=self.commit.step),
            plan=self.commit.plan,
            covers=tuple(self.reduction.covers[b] for b in self._blocks),
            gradients={b: self.reduction.votes[b].digest for b in self._blocks},
            states=dict(self._applied),
        )

    @property
    def _blocks(self) -> range:
        return range(*self._place)

    def _wrap(self, effects: Sequence[StepEffect]) -> list[Effect]:
        return [InStep(self.id, effect) for effect in effects]


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
