"""A volunteer's protocol core: from the handshake to the applied update.

Pure: messages, tensors (as opaque handles) and finished work in, effects out. The daemon and the simulator drive the
same object. It trusts nobody's fields about themselves: senders come from the transport, and whatever is not of our
(term, view, step), or from an incarnation that is not in the roster, changes nothing (docs/protocol.md, fencing).
Tensors that arrive before the message that explains them are held back until it does.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hetpeer.averaging import messages as m
from hetpeer.averaging import reduction
from hetpeer.averaging.effects import (
    ApplyUpdate,
    Choose,
    EndStep,
    FetchState,
    Leave,
    Prepare,
    RecordApplied,
    SaveState,
    Shard,
    StepId,
    Stop,
    Tell,
)
from hetpeer.averaging.reduction import Reduction
from hetpeer.stages.execution import pipeline
from hetpeer.stages.execution.effects import (
    Handle,
    Release,
    ReportEvaluated,
    ReportFailed,
    ReportSealed,
    TaskKey,
)
from hetpeer.stages.execution.pipeline import Pipeline
from hetpeer.stages.execution.routes import Route

StepEffect = pipeline.Effect | reduction.Effect | ApplyUpdate


@dataclass(frozen=True, slots=True)
class InStep:
    """`effect` belongs to `step`; the driver gives `step` back with the answer."""

    step: StepId
    effect: StepEffect


Effect = (
    InStep
    | Release
    | Tell
    | Choose
    | Prepare
    | FetchState
    | SaveState
    | RecordApplied
    | EndStep
    | Leave
    | Stop
)

MAX_EARLY = 4096
"""Tensors held back at most; beyond that the newest are dropped (their senders still keep them)."""


class Phase(enum.Enum):
    """A member's life in the run, as `status` shows it."""

    JOINING = "joining"
    PREPARING = "preparing"
    SYNCING = "syncing"
    READY = "ready"
    TRAINING = "training"
    REDUCING = "reducing"
    APPLYING = "applying"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor came from and what it belongs to; `plan` is None for activations and gradients."""

    sender: str
    incarnation: int
    step: StepId
    plan: int | None = None


@dataclass(slots=True)
class _Step:
    id: StepId
    pipeline: Pipeline
    incarnations: dict[str, int]
    reduction: Reduction | None = None
    applied: dict[int, str] = field(default_factory=dict)
    commit: m.Commit | None = None


def _after(a: m.Line, b: m.Line) -> bool:
    return (a.term, a.view) > (b.term, b.view)


class Member:
    """The core of one volunteer.

    `sizes`: elements of each block's flat gradient; `slot_capacity`: S of docs/protocol.md, both from the manifest.
    """

    def __init__(self, me: str, hello: m.Hello, sizes: Mapping[int, int], slot_capacity: int) -> None:
        self.me = me
        self.phase = Phase.JOINING
        self.line = m.Line(term=0, view=0)
        self.place: m.Range | None = None
        self.version: int | None = None
        self.digests: dict[int, str] = {}
        self.loss: float | None = None
        self._hello = hello
        self._sizes = sizes
        self._slot_capacity = slot_capacity
        self._step: _Step | None = None
        self._early: list[tuple[Origin, Callable[[], list[Effect]], Handle]] = []
        self._deferred: list[m.Message] = []

    # ── the control stream ───────────────────────────────────────────────────────────────────────────────────────

    def connected(self) -> list[Effect]:
        """A fresh session with a coordinator: introduce ourselves, with what we still hold."""
        held = () if self.version is None else self._held()
        place = self.place if self.phase is not Phase.PREPARING else None
        return [Tell(self._hello.model_copy(update={"held": held, "place": place}))]

    def reborn(self, incarnation: int) -> list[Effect]:
        """After `Leave`: the same volunteer with a new incarnation; what it holds is not trusted any more."""
        effects = self._drop_step()
        self._deferred.clear()
        self.version = None
        self._hello = self._hello.model_copy(update={"incarnation": incarnation})
        self.phase = Phase.JOINING
        return effects

    @property
    def incarnation(self) -> int:
        return self._hello.incarnation

    @property
    def step(self) -> StepId | None:
        """The step in progress."""
        return self._step.id if self._step else None

    def receive(self, message: m.Message) -> list[Effect]:
        """A message of the coordinator. Messages of another line of history are ignored."""
        handler = self._HANDLERS.get(type(message))
        if handler is None:
            return []
        if self.phase is Phase.APPLYING and not isinstance(message, self._URGENT):
            self._deferred.append(message)
            return []
        line = getattr(message, "line", None)
        if line is not None and line != self.line and not isinstance(message, self._LINE_SETTERS):
            return []
        effects: list[Effect] = handler(self, message)
        return effects

    def _welcome(self, message: m.Welcome) -> list[Effect]:
        effects: list[Effect] = []
        commit = message.commit
        missed = (
            commit is not None
            and self._step is not None
            and commit.step == self._step.id.number == self.version
            and self._step.reduction is not None
            and self._step.reduction.matches(commit.digests, self._blocks())
        )
        self.line = message.line
        if missed and commit is not None:
            self._deferred.append(message.model_copy(update={"commit": None}))
            return self._commit(commit.model_copy(update={"line": message.line}))
        effects += self._drop_step()
        if not message.member or self.place is None:
            return [*effects, Choose(message.places)]
        if self.version == message.version:
            self.phase = Phase.READY
            return [*effects, self._ready()]
        self.phase = Phase.SYNCING
        return [*effects, Tell(m.Prepared())]

    def chosen(self, place: m.Place) -> list[Effect]:
        """The daemon chose `place` from those offered."""
        return [Tell(m.Claim(cluster=place.cluster, begin=place.begin, end=place.end))]

    def _refused(self, message: m.Refused) -> list[Effect]:
        return [Choose(message.places)]

    def _granted(self, message: m.Granted) -> list[Effect]:
        same = self.place == (message.begin, message.end)
        self.place = (message.begin, message.end)
        if same and self.version is not None:
            self.phase = Phase.SYNCING
            return [Tell(m.Prepared())]
        self.version = None
        self.phase = Phase.PREPARING
        return [Prepare(message.begin, message.end)]

    def prepared(self) -> list[Effect]:
        """The graphs of our place are loaded."""
        self.phase = Phase.SYNCING
        return [Tell(m.Prepared())]

    def _fetch(self, message: m.Fetch) -> list[Effect]:
        self.line = message.line
        self.phase = Phase.SYNCING
        if self.version == message.version and all(
            message.digests.get(b, d) == d for b, d in self.digests.items()
        ):
            return [*self._drop_step(), self._ready()]
        return [
            *self._drop_step(),
            FetchState(message.line, message.version, message.sources, message.digests),
        ]

    def state_loaded(self, line: m.Line, version: int, digests: Mapping[int, str]) -> list[Effect]:
        """The worker holds `version` of all our blocks; `line` is that of the Fetch."""
        if line != self.line:
            return []
        self.version, self.digests = version, dict(digests)
        return [self._ready()]

    def _ready(self) -> Tell:
        self.phase = Phase.READY
        assert self.version is not None
        return Tell(m.Ready(line=self.line, version=self.version, held=self._held()))

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, message: m.Begin) -> list[Effect]:
        if message.step != self.version:
            return [Tell(m.Prepared())]
        effects = self._drop_step()
        core = Pipeline(self.me, message.roster, message.microbatches, self._slot_capacity)
        self._step = _Step(StepId(message.line, message.step), core, dict(message.incarnations))
        self.phase = Phase.TRAINING
        for task in message.tasks:
            effects += self._absorb(core.assign(task.id, task.route, task.attempt))
        return effects + self._replay_early()

    def _reroute(self, message: m.Reroute) -> list[Effect]:
        if self._step is None or message.step != self._step.id.number:
            return []
        effects: list[Effect] = []
        for task in message.tasks:
            effects += self._absorb(self._step.pipeline.assign(task.id, task.route, task.attempt))
        return effects

    def _gone(self, message: m.Gone) -> list[Effect]:
        if self._step is None:
            return []
        effects: list[Effect] = []
        for peer in message.peers:
            self._step.incarnations.pop(peer, None)
            effects += self._absorb(self._step.pipeline.gone(peer))
        return effects

    def unreachable(self, peer: str) -> list[Effect]:
        """Our link to `peer` is down and could not be opened again."""
        return [] if self._step is None else self._absorb(self._step.pipeline.unreachable(peer))

    def reachable(self, peer: str) -> None:
        """The link to `peer` is up again."""
        if self._step is not None:
            self._step.pipeline.reachable(peer)

    def _settled(self, message: m.Settled) -> list[Effect]:
        if self._step is None or message.step != self._step.id.number:
            return []
        return self._absorb(self._step.pipeline.settled(message.slot, message.refused))

    def _evict(self, message: m.Evict) -> list[Effect]:
        if self._step is None or message.step != self._step.id.number:
            return []
        return self._absorb(self._step.pipeline.evict(message.blocks))

    def activation(
        self, origin: Origin, microbatch: int, route: Route, attempt: int, handle: Handle
    ) -> list[Effect]:
        """A bundle of activations from the hop before us; `route` starts with our own hop."""

        def accept() -> list[Effect]:
            assert self._step is not None
            assert self.place is not None
            hop = route[0]
            if hop.peer != self.me or not self.place[0] <= hop.begin < hop.end <= self.place[1]:
                return [Release(handle)]
            return self._absorb(
                self._step.pipeline.activation(microbatch, route, attempt, origin.sender, handle)
            )

        return self._admit(origin, accept, handle)

    def gradient(self, origin: Origin, microbatch: int, border: int, handle: Handle) -> list[Effect]:
        """The gradient of a bundle that we had sent over `border`."""

        def accept() -> list[Effect]:
            assert self._step is not None
            return self._absorb(self._step.pipeline.gradient(microbatch, border, handle))

        return self._admit(origin, accept, handle)

    def forward_done(
        self, step: StepId, key: TaskKey, output: Handle | None, loss: float | None
    ) -> list[Effect]:
        """`RunForward` is done."""
        if self._step is None or self._step.id != step:
            return [] if output is None else [Release(output)]
        return self._absorb(self._step.pipeline.forward_done(key, output, loss))

    def backward_done(self, step: StepId, key: TaskKey, input_gradient: Handle | None) -> list[Effect]:
        """`RunBackward` is done."""
        if self._step is None or self._step.id != step:
            return [] if input_gradient is None else [Release(input_gradient)]
        return self._absorb(self._step.pipeline.backward_done(key, input_gradient))

    def work_failed(self, step: StepId, key: TaskKey, why: str) -> list[Effect]:
        """`RunForward` or `RunBackward` could not be done."""
        if self._step is None or self._step.id != step:
            return []
        return self._absorb(self._step.pipeline.work_failed(key, why))

    # ── reduce, vote, apply ──────────────────────────────────────────────────────────────────────────────────────

    def _plan(self, message: m.Plan) -> list[Effect]:
        step = self._step
        if step is None or message.step != step.id.number:
            return []
        if step.reduction is not None and message.plan <= step.reduction.number:
            return []
        step.reduction = Reduction(self.me, message, self._sizes)
        self.phase = Phase.REDUCING
        slots = step.pipeline.slots
        slot = slots.accepted()
        ids = {} if slot is None else slots.contents()[slot]
        return [*self._wrap(step.reduction.start(slot, ids)), *self._replay_early()]

    def part(self, origin: Origin, block: int, index: int, handle: Handle) -> list[Effect]:
        """A holder's slot, one shard of it, for us to sum."""

        def accept() -> list[Effect]:
            assert self._step is not None
            assert self._step.reduction is not None
            return self._wrap(self._step.reduction.part(block, index, origin.sender, handle))

        return self._admit(origin, accept, handle)

    def summed(self, step: StepId, shard: Shard, handle: Handle) -> list[Effect]:
        """`SumParts` is done."""
        current = self._current_reduction(step, shard.plan)
        return [Release(handle)] if current is None else self._wrap(current.summed(shard, handle))

    def result(self, origin: Origin, block: int, index: int, handle: Handle) -> list[Effect]:
        """A reducer's sum of one shard."""

        def accept() -> list[Effect]:
            assert self._step is not None
            assert self._step.reduction is not None
            return self._wrap(self._step.reduction.result(block, index, origin.sender, handle))

        return self._admit(origin, accept, handle)

    def inspected(self, step: StepId, plan: int, vote: m.BlockVote, gradient: Handle) -> list[Effect]:
        """`Inspect` is done."""
        current = self._current_reduction(step, plan)
        if current is None:
            return [Release(gradient)]
        current.inspected(vote, gradient)
        effects: list[Effect] = []
        if current.complete:
            votes = tuple(current.votes[b] for b in sorted(current.votes))
            effects.append(Tell(m.Vote(line=self.line, step=step.number, plan=plan, blocks=votes)))
        return effects

    def _commit(self, message: m.Commit) -> list[Effect]:
        step = self._step
        if step is None or message.step != step.id.number or step.commit is not None:
            return []
        if step.reduction is None or not step.reduction.matches(message.digests, self._blocks()):
            self.phase = Phase.SYNCING
            return [*self._drop_step(), Tell(m.Prepared())]
        step.commit = message
        self.phase = Phase.APPLYING
        self.loss = message.loss
        gradients = step.reduction.gradients
        return self._wrap([ApplyUpdate(b, gradients[b], message.coefficient) for b in self._blocks()])

    def applied(self, step: StepId, block: int, digest: str) -> list[Effect]:
        """`ApplyUpdate` is done: the block is at version `step`+1 with these bits."""
        current = self._step
        if current is None or current.id != step or current.commit is None or current.reduction is None:
            return []
        current.applied[block] = digest
        if len(current.applied) < len(self._blocks()):
            return []
        self.version = step.number + 1
        self.digests = dict(current.applied)
        blocks = self._blocks()
        record = RecordApplied(
            step=step,
            plan=current.commit.plan,
            covers=tuple(current.reduction.covers[b] for b in blocks),
            gradients={b: current.reduction.votes[b].digest for b in blocks},
            states=dict(self.digests),
        )
        told = Tell(m.Applied(line=self.line, step=step.number, held=self._held()))
        self.phase = Phase.READY
        effects: list[Effect] = [record, told, *self._drop_step()]
        deferred, self._deferred = self._deferred, []
        for message in deferred:
            effects += self.receive(message)
        return effects

    def _save(self, message: m.Save) -> list[Effect]:
        return [SaveState(message.version, message.blocks)] if message.version == self.version else []

    def _rolled_back(self, message: m.RolledBack) -> list[Effect]:
        self.line = message.line
        if self.phase is Phase.APPLYING or self.version != message.version:
            self.version = None
        self._deferred.clear()
        effects = self._drop_step()
        if self.place is None or self.phase is Phase.PREPARING:
            return effects
        self.phase = Phase.SYNCING
        return [*effects, Tell(m.Prepared())]

    def _fenced(self, message: m.Fenced) -> list[Effect]:
        return [Leave(message.why)]

    def _finished(self, message: m.Finished) -> list[Effect]:
        self.phase = Phase.STOPPED
        return [*self._drop_step(), Stop(message.why, message.completed)]

    def _rejected(self, message: m.Rejected) -> list[Effect]:
        self.phase = Phase.STOPPED
        return [*self._drop_step(), Stop(message.why, completed=False, rejected=message.reason)]

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self, origin: Origin, accept: Callable[[], list[Effect]], handle: Handle) -> list[Effect]:
        """Fencing for tensors: take it now, hold it back until its step or plan is known, or drop it."""
        step = self._step
        begun = step is not None and origin.step == step.id
        if begun and step is not None:
            if step.incarnations.get(origin.sender) != origin.incarnation:
                return [Release(handle)]
            known = -1 if step.reduction is None else step.reduction.number
            if origin.plan is None or origin.plan == known:
                return accept()
            if origin.plan < known:
                return [Release(handle)]
        elif not self._may_come(origin):
            return [Release(handle)]
        if len(self._early) >= MAX_EARLY:
            return [Release(handle)]
        self._early.append((origin, accept, handle))
        return []

    def _may_come(self, origin: Origin) -> bool:
        """Whether the step of `origin` may still begin here."""
        line, number = origin.step
        if _after(line, self.line):
            return True
        return line == self.line and (self.version is None or number >= self.version)

    def _replay_early(self) -> list[Effect]:
        early, self._early = self._early, []
        effects: list[Effect] = []
        for origin, accept, handle in early:
            effects += self._admit(origin, accept, handle)
        return effects

    def _absorb(self, effects: Sequence[pipeline.Effect]) -> list[Effect]:
        """Turn the pipeline's reports into messages; everything else goes to the driver as it is."""
        assert self._step is not None
        return [self._report(effect, self._step.id) for effect in effects]

    def _wrap(self, effects: Sequence[StepEffect]) -> list[Effect]:
        assert self._step is not None
        return [InStep(self._step.id, effect) for effect in effects]

    def _report(self, effect: pipeline.Effect, step: StepId) -> Effect:
        number = step.number
        match effect:
            case ReportSealed(slot, ids, losses):
                contents = tuple(_ranges(ids))
                return Tell(
                    m.Sealed(line=self.line, step=number, slot=slot, contents=contents, losses=dict(losses))
                )
            case ReportEvaluated(microbatch, loss):
                return Tell(m.Evaluated(line=self.line, step=number, losses={microbatch: loss}))
            case ReportFailed(microbatch, why):
                return Tell(m.Failed(line=self.line, step=number, id=microbatch, why=why[:500]))
            case _:
                return InStep(step, effect)

    def _current_reduction(self, step: StepId, plan: int) -> Reduction | None:
        if self._step is None or self._step.id != step or self._step.reduction is None:
            return None
        return self._step.reduction if self._step.reduction.number == plan else None

    def _drop_step(self) -> list[Effect]:
        step, self._step = self._step, None
        return [] if step is None else [EndStep(step.id)]

    def _blocks(self) -> range:
        assert self.place is not None
        return range(*self.place)

    def _held(self) -> tuple[m.Held, ...]:
        assert self.version is not None
        return tuple(m.Held(block=b, version=self.version, digest=d) for b, d in sorted(self.digests.items()))

    _LINE_SETTERS = (m.Welcome, m.Fetch, m.RolledBack)
    _URGENT = (m.RolledBack, m.Fenced, m.Finished, m.Rejected)
    _HANDLERS: Mapping[type, Callable[..., list[Effect]]] = {
        m.Welcome: _welcome,
        m.Refused: _refused,
        m.Granted: _granted,
        m.Fetch: _fetch,
        m.Begin: _begin,
        m.Reroute: _reroute,
        m.Gone: _gone,
        m.Settled: _settled,
        m.Evict: _evict,
        m.Plan: _plan,
        m.Commit: _commit,
        m.Save: _save,
        m.RolledBack: _rolled_back,
        m.Fenced: _fenced,
        m.Finished: _finished,
        m.Rejected: _rejected,
    }


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
