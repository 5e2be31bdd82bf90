"""Fingerprints of the parts that a reducer has received, kept until the step ends (docs/trust.md).

Spot checks and sum proofs ask for them. Each plan has a key of its own, which nobody else hears before all
have voted. Fingerprints under other keys are taken as well if the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hetpeer.averaging.effects import Shard, StepId
from hetpeer.averaging.messages import MOST_RECEIPTS, Mark, Receipt, Where
from hetpeer.stages.block.fingerprint import Fingerprint, pack


@dataclass(slots=True)
class _Range:
    begin: int
    end: int
    marks: Fingerprint


@dataclass(slots=True)
class _Plan:
    key: bytes
    parts: dict[tuple[str, int], _Range] = field(default_factory=dict)
    """(holder, block) → what it has sent of our share."""
    besides: dict[tuple[str, Where], Fingerprint] = field(default_factory=dict)
    """Holder and what the plan has named → how what has come of that looks."""


class ReceivedParts:
    """`draw` gives a fresh key."""

    def __init__(self, draw: Callable[[], bytes]) -> None:
        self._draw = draw
        self._plans: dict[tuple[StepId, int], _Plan] = {}

    def key(self, step: StepId, plan: int) -> bytes:
        """Under which parts of that plan are fingerprinted."""
        return self._plan(step, plan).key

    def _plan(self, step: StepId, plan: int) -> _Plan:
        known = self._plans.get((step, plan))
        if known is None:
            known = self._plans[step, plan] = _Plan(self._draw())
        return known

    def wanted(self, step: StepId, shard: Shard, named: Iterable[Mark]) -> list[Mark]:
        """Marks for the fingerprints of a part of `shard`: all of it, and its pieces of `named` ranges."""
        key = self.key(step, shard.plan)
        within = [
            one.model_copy(update={"begin": max(one.begin, shard.begin), "end": min(one.end, shard.end)})
            for one in named
        ]
        own = Mark(block=shard.block, begin=shard.begin, end=shard.end, key=key)
        return [own, *(one for one in within if one.begin < one.end)]

    def add(
        self,
        step: StepId,
        shard: Shard,
        holder: str,
        marks: Sequence[Fingerprint],
        named: Sequence[Mark] = (),
    ) -> None:
        """Keep `marks`: fingerprints at `wanted` of `holder`'s part. The shards of a reducer are adjacent."""
        plan = self._plan(step, shard.plan)
        whole, *more = marks
        known = plan.parts.get((holder, shard.block))
        if known is None:
            plan.parts[holder, shard.block] = _Range(shard.begin, shard.end, whole)
        else:
            known.begin, known.end = min(known.begin, shard.begin), max(known.end, shard.end)
            known.marks = known.marks + whole
        within = [one for one in named if max(one.begin, shard.begin) < min(one.end, shard.end)]
        for one, own in zip(within, more, strict=True):
            before = plan.besides.get((holder, one.where))
            plan.besides[holder, one.where] = own if before is None else before + own

    def of(self, step: StepId, plan: int, holder: str) -> tuple[Mark, ...]:
        """Marks of what `holder` has sent us under `plan`."""
        known = self._plans.get((step, plan))
        if known is None:
            return ()
        return tuple(
            Mark(block=block, begin=one.begin, end=one.end, key=known.key, values=pack(one.marks))
            for (peer, block), one in sorted(known.parts.items())
            if peer == holder
        )

    def testify(self, step: StepId, plan: int, asked: Iterable[Mark]) -> tuple[Receipt, ...]:
        """Receipts of what every holder has sent us under `plan`, at the ranges that are `asked` for."""
        known = self._plans.get((step, plan))
        if known is None:
            return ()
        seen = known.besides | {
            (peer, (block, one.begin, one.end, known.key)): one.marks
            for (peer, block), one in known.parts.items()
        }
        places = {one.where for one in asked}
        found = [
            Receipt(peer=peer, mark=_mark(place, values))
            for (peer, place), values in sorted(seen.items(), key=lambda one: one[0])
            if place in places
        ]
        return tuple(found[:MOST_RECEIPTS])

    def end_step(self, step: StepId) -> None:
        """Forget `step`: no coordinator asks for it any more."""
        self._plans = {named: plan for named, plan in self._plans.items() if named[0] != step}


def _mark(place: Where, marks: Fingerprint) -> Mark:
    block, begin, end, key = place
    return Mark(block=block, begin=begin, end=end, key=key, values=pack(marks))
