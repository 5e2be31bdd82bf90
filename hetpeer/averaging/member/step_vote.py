"""The second half of a step at a holder: reduce plans, our vote on their sums, and the update.

Pure. held_step.py has the first half, in which microbatches are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import (
    COPY,
    STATE,
    ApplyUpdate,
    Effect,
    InstallAverage,
    InStep,
    KeepCopy,
    Look,
    ProveSums,
    RecordApplied,
    Shard,
    ShareUplink,
    SlotSum,
    StepEffect,
    StepId,
    Tell,
)
from hetpeer.averaging.reduce.holder_reduce import Reduction
from hetpeer.averaging.reduce.reduce_shards import LENGTH
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.delays import Delays
from hetpeer.stages.pipeline.gradient_slots import Drop, GradientSlots, Merge

MOST_MISSED = 256
"""Peers that one `Missed` names at most, of each kind."""
MOST_NAMED = 1 << 12
"""Entries of `received` and of `lengths` in one vote at most."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Facts about the model that a member needs."""

    sizes: Mapping[int, int]
    """Block → elements of its flat vector (parameters, then statistics)."""
    slot_capacity: int
    """Microbatches that a slot may hold (S of docs/protocol.md)."""
    ties: Ties = field(default_factory=Ties)
    delays: Delays = field(default_factory=Delays)
    """Versions that the microbatches of steps that overlap are computed with."""
    shard_length: int = LENGTH
    """Elements of a shard."""
    sparse: bool = False
    """Whether averagings are of movements, which every receiver adds up itself."""


class StepVote:
    """Reduce, vote and update of `step`, at holder `me` of the blocks `place`.

    `slots` are what the step's tasks have counted. A `delayed` averaging runs beside steps.
    """

    def __init__(
        self, me: str, place: m.Range, step: StepId, shape: ModelShape, slots: GradientSlots, *, delayed: bool
    ) -> None:
        self.reduction: Reduction | None = None
        """Our part in the newest plan; None before the first one."""
        self.commit: m.Commit | None = None
        """The commit that is being applied."""
        self._me = me
        self._blocks = range(*place)
        self._step = step
        self._shape = shape
        self._slots = slots
        self._delayed = delayed
        self._averages = step.group > 0
        """Parameters are averaged, and nothing is trained."""
        self._slot: int | None = None
        """The slot that we send under the newest plan."""
        self._applied: dict[int, str] = {}
        """Block → digest of its updated state, of the blocks that are done."""

    def start(self) -> list[Effect]:
        """Keep a copy of the parameters as they are now, for a delayed averaging."""
        return self._wrap([KeepCopy(block) for block in self._blocks]) if self._delayed else []

    # ── reduce and vote ─────────────────────────────────────────────────────────────────────────────────────

    def plan(self, message: m.Plan) -> list[Effect]:
        """Take part in a plan; it voids lower ones. A plan that we know already changes nothing."""
        if self.reduction is not None and message.plan <= self.reduction.number:
            return []
        missed = self._missed()
        void = [] if self.reduction is None else self.reduction.abandon()
        # The copies of a tied parameter are averaged one by one: they are equal, and stay equal.
        ties = Ties() if self._averages else self._shape.ties
        shape = self._shape
        self.reduction = Reduction(
            self._me,
            message,
            shape.sizes,
            ties,
            shape.shard_length,
            by_all=shape.ties if self._averages and shape.sparse else None,
        )
        outgoing = self.reduction.outgoing()
        shared = [ShareUplink(outgoing)] if outgoing else []
        self._slot, ids = self._sums()
        return [*missed, *self._wrap([*void, *shared, *self.reduction.start(self._slot, ids)])]

    def _missed(self) -> list[Effect]:
        """Name the peers whose parts or sums a given-up plan still lacked here."""
        if self.reduction is None or self.reduction.complete:
            return []
        sums, parts = (tuple(sorted(peers)[:MOST_MISSED]) for peers in self.reduction.missing())
        return [Tell(m.Missed(**self._named, plan=self.reduction.number, sums=sums, parts=parts))]

    def _sums(self) -> tuple[int | None, Mapping[int, frozenset[int]]]:
        """The slot that we send, and block → ids in it. In an averaging clusters stand in for ids."""
        if self._averages:
            return COPY if self._delayed else STATE, dict.fromkeys(
                self._blocks, frozenset((self._step.line.cluster,))
            )
        slot = self._slots.accepted()
        return slot, {} if slot is None else self._slots.contents()[slot]

    def part(self, sender: str, block: int, index: int, handle: p.Handle) -> list[Effect]:
        """One shard of a holder's slot, for us to add up under the current plan."""
        assert self.reduction is not None
        return [*self._wrap(self.reduction.part(block, index, sender, handle)), *self._news()]

    def result(self, sender: str, block: int, index: int, handle: p.Handle, length: int) -> list[Effect]:
        """A reducer's sum of one shard under the current plan."""
        assert self.reduction is not None
        return [*self._wrap(self.reduction.result(block, index, sender, handle, length)), *self._news()]

    def _news(self) -> list[Effect]:
        """Tell the coordinator that the reduce goes on, so that it does not give up a long one."""
        assert self.reduction is not None
        if not self.reduction.has_news():
            return []
        return [Tell(m.Reducing(**self._named, plan=self.reduction.number))]

    def summed(
        self, shard: Shard, handle: p.Handle, lengths: Sequence[float] = (), looks: Sequence[Look] = ()
    ) -> list[Effect]:
        """`SumParts` is done; `lengths`: squared lengths of its parts; `looks`: inspections of them."""
        if not self._is_current(shard.plan):
            return [p.Release(handle)]
        assert self.reduction is not None
        return self._wrap(self.reduction.summed(shard, handle, lengths, looks))

    def unusable(self, shard: Shard, part: int, why: str) -> list[Effect]:
        """`SumParts` cannot be done: object to the holder of part number `part`."""
        if not self._is_current(shard.plan):
            return []
        assert self.reduction is not None
        holder, _ = self.reduction.covers[shard.block].slots[part]
        objection = m.Objection(**self._named, plan=shard.plan, block=shard.block, peer=holder, why=why[:500])
        return [Tell(objection)]

    def slots_changed(self, effects: Sequence[p.Effect]) -> None:
        """Note that `effects` change slots: one that is a block's sum is so no longer."""
        if self.reduction is None:
            return
        for effect in effects:
            match effect:
                case Merge(block, _, slot) | Drop(block, slot):
                    self.reduction.slot_changed(block, slot)
                case _:
                    pass

    def inspected(
        self, plan: int, vote: m.BlockVote, gradient: p.Handle | SlotSum, looks: Sequence[Look]
    ) -> list[Effect]:
        """`Inspect` or `InspectSlot` is done for one block; vote after the last of our blocks."""
        if not self._is_current(plan):
            return [] if isinstance(gradient, SlotSum) else [p.Release(gradient)]
        assert self.reduction is not None
        self.reduction.inspected(vote, gradient, looks)
        if not self.reduction.complete:
            return []
        votes = tuple(self.reduction.votes[b] for b in sorted(self.reduction.votes))
        word = m.Vote(
            **self._named,
            plan=plan,
            blocks=votes,
            received=self.reduction.received[:MOST_NAMED],
            lengths=self.reduction.lengths[:MOST_NAMED],
        )
        return [*self._wrap(self.reduction.release_observed()), Tell(word)]

    def prove(self, asked: m.Prove) -> list[Effect]:
        """Fingerprint what we sent and got in the plan that we voted on; nothing for another plan."""
        reduction = self.reduction
        if reduction is None or reduction.number != asked.plan or not reduction.complete:
            return []
        sums = reduction.sums({mark.block for mark in asked.marks})
        slots = {} if self._slot is None else dict.fromkeys(reduction.counted(), self._slot)
        return self._wrap([ProveSums(asked, slots, sums)])

    @property
    def _named(self) -> dict[str, Any]:
        """Fields of a message that name this step or averaging."""
        return {"line": self._step.line, "step": self._step.number, "group": self._step.group}

    def _is_current(self, plan: int) -> bool:
        return self.reduction is not None and self.reduction.number == plan

    # ── apply ───────────────────────────────────────────────────────────────────────────────────────────────

    def matches(self, commit: m.Commit) -> bool:
        """Whether `commit` decides this step and names the very gradients that we hold."""
        return (
            (self._step.line, self._step.group) == (commit.line, commit.group)
            and (self._averages or self._step.number == commit.step)
            and self._is_current(commit.plan)
            and self.reduction is not None
            and self.reduction.matches(commit.digests, self._blocks)
        )

    def apply(self, commit: m.Commit, oldest: int) -> list[Effect]:
        """Apply the decided update; versions from `oldest` on are still computed with. Requires `matches`."""
        assert self.reduction is not None
        self.commit = commit
        gradients = {b: self.reduction.gradient(b) for b in self._blocks}
        if self._averages:
            return self._wrap(
                [
                    InstallAverage(b, commit.plan, commit.step, gradients[b], commit.coefficient, oldest)
                    for b in self._blocks
                ]
            )
        one = (commit.coefficient, oldest, commit.workers)
        ids = {
            b: frozenset(i for _, held in self.reduction.covers[b].slots for i in held) for b in self._blocks
        }
        return self._wrap([ApplyUpdate(b, commit.plan, gradients[b], *one, ids[b]) for b in self._blocks])

    def applied(self, block: int, digest: str) -> RecordApplied | None:
        """`ApplyUpdate` or `InstallAverage` is done for `block`; after the last one, the update's record."""
        if self.commit is None or self.reduction is None:
            return None
        self._applied[block] = digest
        if len(self._applied) < len(self._blocks):
            return None
        return RecordApplied(
            step=self._step._replace(number=self.commit.step),
            plan=self.commit.plan,
            covers=tuple(self.reduction.covers[b] for b in self._blocks),
            gradients={b: self.reduction.votes[b].digest for b in self._blocks},
            states=dict(self._applied),
        )

    def _wrap(self, effects: Sequence[StepEffect]) -> list[Effect]:
        return [InStep(self._step, effect) for effect in effects]
