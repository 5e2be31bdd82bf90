"""The second half of a step at a holder: the plans that add up what is counted, our vote on what comes of them, and the update.

Pure. held_step.py has the first half, in which microbatches are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import (
    COPY,
    EVERY_ID,
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
    StepEffect,
    StepId,
    Tell,
)
from hetpeer.averaging.reduce.holder_reduce import LENGTH, Reduction
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.pipeline import Pipeline

MOST_MISSED, MOST_NAMED = 256, 1 << 12
"""Peers that are named; blocks and peers."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a member must know of the model."""

    sizes: Mapping[int, int]
    """Block -> elements of its flat vector (parameters, then statistics)."""
    slot_capacity: int
    """S of docs/protocol.md: microbatches a slot may hold."""
    ties: Ties = field(default_factory=Ties)
    head_start: int = EVERY_ID
    """Ids of a step that may be computed before the steps before it are committed; the others wait for that."""
    shard_length: int = LENGTH


class Voting:
    """Of `step`, at holder `me` of the blocks `place`, whose microbatches `pipeline` computes."""

    def __init__(
        self, me: str, place: m.Range, step: StepId, shape: Shape, pipeline: Pipeline, *, delayed: bool
    ) -> None:
        self.id = step
        self.pipeline = pipeline
        self.reduction: Reduction | None = None
        self.commit: m.Commit | None = None
        self.delayed = delayed
        self._slot: int | None = None
        """What we send under the latest plan."""
        self._me = me
        self._place = place
        self._shape = shape
        self._applied: dict[int, str] = {}

    @property
    def averages(self) -> bool:
        """Whether parameters are averaged in it, and nothing is trained."""
        return self.id.group > 0

    def start(self) -> list[Effect]:
        """What is averaged beside other steps is kept as it is now."""
        return self._wrap([KeepCopy(block) for block in self._blocks]) if self.delayed else []

    # ── reduce and vote ──────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, message: m.Plan) -> list[Effect]:
        """Take part in a plan; a higher one voids the one before. Nothing for one that we know already."""
        if self.reduction is not None and message.plan <= self.reduction.number:
            return []
        missed = self._missed()
        void = [] if self.reduction is None else self.reduction.abandon()
        # copies of a tied parameter are averaged each: they are alike, and stay so
        ties = Ties() if self.averages else self._shape.ties
        self.reduction = Reduction(self._me, message, self._shape.sizes, ties, self._shape.shard_length)
        outgoing = self.reduction.outgoing()
        shared = [ShareUplink(outgoing)] if outgoing else []
        self._slot, ids = self._sums()
        return [*missed, *self._wrap([*void, *shared, *self.reduction.start(self._slot, ids)])]

    def _missed(self) -> list[Effect]:
        """What a plan that is given up has waited for here."""
        if self.reduction is None or self.reduction.complete:
            return []
        sums, parts = (tuple(sorted(peers)[:MOST_MISSED]) for peers in self.reduction.missing())
        return [Tell(m.Missed(**self._named, plan=self.reduction.number, sums=sums, parts=parts))]

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

    def result(self, sender: str, block: int, index: int, handle: p.Handle, length: int) -> list[Effect]:
        """A reducer's sum of one shard under the current plan."""
        assert self.reduction is not None
        return [*self._wrap(self.reduction.result(block, index, sender, handle, length)), *self._news()]

    def _news(self) -> list[Effect]:
        """A reduce that takes long is not to be given up while it goes on."""
        assert self.reduction is not None
        if not self.reduction.has_news():
            return []
        return [Tell(m.Reducing(**self._named, plan=self.reduction.number))]

    def summed(self, shard: Shard, handle: p.Handle, lengths: Sequence[float] = ()) -> list[Effect]:
        """`SumParts` is done."""
        if not self._is_current(shard.plan):
            return [p.Release(handle)]
        assert self.reduction is not None
        return self._wrap(self.reduction.summed(shard, handle, lengths))

    def unusable(self, shard: Shard, part: int, why: str) -> list[Effect]:
        """`SumParts` cannot be done: whose fault it is."""
        if not self._is_current(shard.plan):
            return []
        assert self.reduction is not None
        holder, _ = self.reduction.covers[shard.block].slots[part]
        objection = m.Objection(**self._named, plan=shard.plan, block=shard.block, peer=holder, why=why[:500])
        return [Tell(objection)]

    def inspected(
        self, plan: int, vote: m.BlockVote, gradient: p.Handle, looks: Sequence[Look]
    ) -> list[Effect]:
        """`Inspect` is done; after the last of our blocks we vote."""
        if not self._is_current(plan):
            return [p.Release(gradient)]
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
        return [Tell(word)]

    def prove(self, asked: m.Prove) -> list[Effect]:
        """We have voted, and are to say how what we have sent and got looks."""
        reduction = self.reduction
        if reduction is None or reduction.number != asked.plan or not reduction.complete:
            return []
        sums = reduction.sums({mark.block for mark in asked.marks})
        slots = {} if self._slot is None else dict.fromkeys(reduction.counted(), self._slot)
        return self._wrap([ProveSums(asked, slots, sums)])

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
