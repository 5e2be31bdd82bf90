"""Seeded bugs: each breaks one rule of the protocol, to show that the simulator finds it.

`with MUTANTS["old_votes"]():` patches the rule for the time of the block. Many of them are bugs that the
cores had, or that look harmless. docs/protocol.md says how many histories it takes to catch each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import Effect, StepId, SumParts
from hetpeer.averaging.member.held_step import HeldStep
from hetpeer.averaging.member.member import Member
from hetpeer.averaging.member.position import Due, Origin
from hetpeer.averaging.member.work_in_progress import WorkInProgress
from hetpeer.averaging.reduce.holder_reduce import Reduction
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.bootstrap.coordinator import reduction
from hetpeer.bootstrap.coordinator.checkpoint_collection import CheckpointCollection
from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.bootstrap.coordinator.reduction import Reduce
from hetpeer.bootstrap.coordinator.step_ledger import SlotVerdict, StepLedger
from hetpeer.bootstrap.state.effects import CollectCheckpoint
from hetpeer.bootstrap.state.timeouts import AdaptiveTimeouts
from hetpeer.peer.simulate.sim_swarm import SimSwarm
from hetpeer.stages.pipeline.effects import Handle, TaskKey
from hetpeer.stages.pipeline.gradient_slots import GradientSlots
from hetpeer.stages.pipeline.pipeline import Pipeline
from hetpeer.stages.pipeline.schedule_1f1b import Schedule

Mutant = Callable[[], AbstractContextManager[None]]


@contextmanager
def _patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _answering(kind: type, handler: Callable[..., list[Effect]]) -> AbstractContextManager[None]:
    """Let a member answer messages of one kind with `handler`."""
    table = vars(Member)["_TABLE"]
    return _patched(Member, "_TABLE", {**table, kind: table[kind]._replace(method=handler)})


# ── counting ────────────────────────────────────────────────────────────────────────────────────────────────


def parts_as_list() -> AbstractContextManager[None]:
    """A reducer adds up parts as they come, so a repeated one counts twice, instead of one per holder."""

    def part(self: Reduction, block: int, index: int, _holder: str, handle: Handle) -> list[Any]:
        cover, key = self.covers.get(block), (block, index)
        if cover is None or key in self._summing:
            return []
        parts = self._parts.setdefault(key, {})
        parts[str(len(parts))] = handle
        if len(parts) < len(cover.slots):
            return []
        self._summing.add(key)
        return [SumParts(self._shards[block][index], tuple(parts.values()))]

    return _patched(Reduction, "part", part)


def fold_twice() -> AbstractContextManager[None]:
    """A gradient is folded into the open slot although a live slot holds that id already."""
    return _patched(GradientSlots, "holds", lambda _self, _microbatch, _block: False)


def tied_apart() -> AbstractContextManager[None]:
    """The holders of one block of a tied parameter update it by that block's gradient alone."""
    divided = reduction.divided

    def without_ties(sums: Any, roster: Any, sizes: Any, _ties: Any, *known: Any, **how: Any) -> Any:
        return divided(sums, roster, sizes, {}, *known, **how)

    def partners(_self: Ties, _block: int) -> list[int]:
        return []

    @contextmanager
    def both() -> Iterator[None]:
        with _patched(reduction, "divided", without_ties), _patched(Ties, "partners", partners):
            yield

    return both()


def overlaps_count() -> AbstractContextManager[None]:
    """A report that overlaps with counted ids is accepted as a whole."""

    def count(self: StepLedger, holder: str, block: int, ids: frozenset[int], _verdict: SlotVerdict) -> bool:
        self._counted[block].update(dict.fromkeys(ids, holder))
        return True

    return _patched(StepLedger, "_count", count)


def dead_still_count() -> AbstractContextManager[None]:
    """Slots of a dead holder stay counted."""
    return _patched(StepLedger, "lose", lambda _self, _holder: False)


def slots_remembered() -> AbstractContextManager[None]:
    """A volunteer that enters a step again, with slot numbers from 0, gets the answers to its old slots."""
    original = StepLedger.lose

    def lose(self: StepLedger, holder: str) -> bool:
        settled = dict(self._settled)
        lost = original(self, holder)
        self._settled = settled
        return lost

    return _patched(StepLedger, "lose", lose)


def evict_ignored() -> AbstractContextManager[None]:
    """A holder keeps counting ids that the coordinator has taken from it."""
    return _patched(Pipeline, "evict", lambda _self, _blocks: [])


def seal_early() -> AbstractContextManager[None]:
    """A slot is sealed while a backward, which may fail, is still being added to it."""
    original = vars(Pipeline)["dispatch"]

    def dispatch(self: Pipeline) -> list[Any]:
        self._folding, folding = 0, self._folding
        effects: list[Any] = original(self)
        self._folding += folding
        return effects

    return _patched(Pipeline, "dispatch", dispatch)


def spoiled_is_done() -> AbstractContextManager[None]:
    """A backward whose slot was dropped meanwhile counts as done, and is never repeated."""
    original = Pipeline.backward_done

    def backward_done(self: Pipeline, key: TaskKey, input_gradient: Handle | None) -> list[Any]:
        task = self._tasks[key]
        effects = original(self, key, input_gradient)
        if self._tasks.get(key) is None:
            self._tasks[key] = task
        return effects

    return _patched(Pipeline, "backward_done", backward_done)


def part_forgotten() -> AbstractContextManager[None]:
    """A reducer forgets all parts but the first, and no bookkeeping notices."""
    original = vars(Reduction)["part"]

    def part(self: Reduction, block: int, index: int, holder: str, handle: Handle) -> list[Any]:
        effects: list[Any] = original(self, block, index, holder, handle)
        return [SumParts(x.shard, x.parts[:1]) if isinstance(x, SumParts) else x for x in effects]

    return _patched(Reduction, "part", part)


# ── fencing ─────────────────────────────────────────────────────────────────────────────────────────────────


def steps_by_number() -> AbstractContextManager[None]:
    """A tensor is assigned to a step by the step's number alone, whatever its term, view or incarnation."""

    def in_step(self: Any, step: StepId) -> HeldStep | None:
        return next((held for held in self.steps if held.id.number == step.number), None)

    def due(self: HeldStep, origin: Origin) -> Due:
        current = None if self.vote.reduction is None else self.vote.reduction.number
        return Due.NOW if origin.plan in (None, current) else Due.LATER

    def at_origin(self: Any, origin: Origin) -> HeldStep | None:
        return in_step(self, origin.step)

    @contextmanager
    def all_three() -> Iterator[None]:
        own, others = (
            _patched(WorkInProgress, "find", in_step),
            _patched(WorkInProgress, "at_origin", at_origin),
        )
        with own, others, _patched(HeldStep, "due", due):
            yield

    return all_three()


def one_entry() -> AbstractContextManager[None]:
    """A volunteer that enters a step again takes results of its first entry for results of the second."""
    original = vars(HeldStep)["__init__"]

    def init(self: HeldStep, me: str, place: m.Range, begin: m.Begin, *rest: Any) -> None:
        original(self, me, place, begin.model_copy(update={"entry": 0}), *rest)

    return _patched(HeldStep, "__init__", init)


def old_messages_heard() -> AbstractContextManager[None]:
    """The coordinator accepts messages of any term and view."""
    original = Coordinator.receive

    def receive(self: Coordinator, peer: str, message: m.Message, now: float) -> list[Any]:
        if isinstance(getattr(message, "line", None), m.TermView):
            message = message.model_copy(update={"line": self.line})
        return original(self, peer, message, now)

    return _patched(Coordinator, "receive", receive)


def old_votes() -> AbstractContextManager[None]:
    """Votes on an older plan count for the newer one."""
    vote, make = Reduce.vote, Reduce.make

    def any_vote(self: Reduce, peer: str, message: m.Vote, *others: Any) -> bool:
        return vote(self, peer, message.model_copy(update={"plan": self.plan}), *others)

    def keeping(self: Reduce, *arguments: Any, **named: Any) -> Any:
        votes = dict(self.votes)
        told = make(self, *arguments, **named)
        self.votes.update(votes)
        return told

    @contextmanager
    def both() -> Iterator[None]:
        with _patched(Reduce, "vote", any_vote), _patched(Reduce, "make", keeping):
            yield

    return both()


# ── states ──────────────────────────────────────────────────────────────────────────────────────────────────


def announce_first() -> AbstractContextManager[None]:
    """A log record becomes durable only after its content was announced."""
    original = SimSwarm.write

    def write(self: SimSwarm, record: dict[str, Any]) -> None:
        life = self.host.life

        def late() -> None:
            if self.coordinator is not None and life == self.host.life:
                original(self, record)

        self.world.after(self.world.random.uniform(0.0, 0.3), late)

    return _patched(SimSwarm, "write", write)


def stale_joiner() -> AbstractContextManager[None]:
    """A joiner says that it is ready without having loaded its version."""

    def fetch(self: Member, message: m.Fetch) -> list[Effect]:
        assert self.place is not None
        self.life.position.version = message.version
        self.life.position.digests = {b: message.digests.get(b, "") for b in range(*self.place)}
        return [*self.work.drop_steps(), self.life.ready()]

    return _answering(m.Fetch, fetch)


def half_loaded() -> AbstractContextManager[None]:
    """A volunteer says that it has its old version while a new one is loaded over it, block by block."""
    original = vars(Member)["_fetch"]

    def fetch(self: Member, message: m.Fetch) -> list[Effect]:
        held = self.life.position.version, self.life.position.digests
        effects: list[Effect] = original(self, message)
        self.life.position.version, self.life.position.digests = held
        return effects

    return _answering(m.Fetch, fetch)


def work_goes_on() -> AbstractContextManager[None]:
    """A holder begins work after the step is decided, on a state that is just being updated."""
    return _patched(Schedule, "close", lambda _self: None)


@contextmanager
def mixed_checkpoint() -> Iterator[None]:
    """A checkpoint takes blocks of another version, and nobody compares them with the holders' digests."""
    original = CheckpointCollection.saved

    def saved(
        self: CheckpointCollection, _order: CollectCheckpoint, block: int, digest: str, now: float
    ) -> None:
        if self._order is not None:
            original(self, self._order, block, digest, now)

    with (
        _patched(CheckpointCollection, "saved", saved),
        _patched(CheckpointCollection, "_false", lambda _self, _words: []),
    ):
        yield


# ── liveness ────────────────────────────────────────────────────────────────────────────────────────────────


def fixed_patience() -> AbstractContextManager[None]:
    """A time-out that is too short for this swarm is never raised."""
    return _patched(AdaptiveTimeouts, "ran_out", lambda _self: None)


MUTANTS: Mapping[str, Mutant] = {
    mutant.__name__: mutant
    for mutant in (
        parts_as_list,
        fold_twice,
        tied_apart,
        overlaps_count,
        dead_still_count,
        slots_remembered,
        evict_ignored,
        part_forgotten,
        seal_early,
        spoiled_is_done,
        steps_by_number,
        one_entry,
        old_messages_heard,
        old_votes,
        announce_first,
        stale_joiner,
        half_loaded,
        work_goes_on,
        mixed_checkpoint,
        fixed_patience,
    )
}
