"""Fingerprints of the tensors that a volunteer was sent, kept until their step ends (docs/trust.md).

Spot checks: `GivenInputs` has the bundles and gradients that a holder has computed from. A fingerprint is
taken under a key of the step that nobody else ever hears: it is compared with the tensor that a checker sends
in its place. By its digest two peers can show that they have computed from the same tensor.

Spot checks and sum proofs: `ReceivedParts` has the parts that a reducer has added up. Each plan has a key of
its own, which nobody else hears before all have voted. Fingerprints under other keys are taken as well if the
plan says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hetpeer.averaging.effects import Shard, StepId
from hetpeer.averaging.messages import MOST_RECEIPTS, Compared, Given, Mark, Receipt, Where
from hetpeer.stages.block.fingerprint import Fingerprint, difference, distance, pack
from hetpeer.stages.pipeline.effects import CompareBundle, TaskKey

UNLIKE = 1e300
"""Difference of tensors that rounding cannot explain: of integers, or without a fingerprint."""
MOST_SHOWN = 1 << 13
"""Digests that are shown at a time."""


@dataclass(slots=True)
class GivenInput:
    """A bundle of `sender`, or its gradient (`back`). Fingerprint and digest follow when they are computed.

    `exact` is the fingerprint of those numbers that are never rounded.
    """

    key: TaskKey
    border: int
    back: bool
    sender: str
    marks: bytes = b""
    exact: bytes = b""
    digest: bytes = b""


@dataclass(slots=True)
class _Step:
    secret: bytes
    seen: list[GivenInput] = field(default_factory=list)


class GivenInputs:
    """The inputs of one place. `draw` gives a fresh key.

    Two fingerprints at most `tolerance` apart are taken to be of the same tensor.
    """

    def __init__(self, draw: Callable[[], bytes], tolerance: float) -> None:
        self._draw = draw
        self._tolerance = tolerance
        self._steps: dict[StepId, _Step] = {}

    def _of(self, step: StepId) -> _Step:
        if step not in self._steps:
            self._steps[step] = _Step(self._draw())
        return self._steps[step]

    def secret(self, step: StepId) -> bytes:
        """The key under which bundles are fingerprinted."""
        return self._of(step).secret

    def used(self, step: StepId, key: TaskKey, border: int, sender: str, *, back: bool = False) -> GivenInput:
        """Note that `key` uses `sender`'s bundle that enters `border`, or with `back` its gradient."""
        seen = GivenInput(key, border, back, sender)
        self._of(step).seen.append(seen)
        return seen

    def compared(self, step: StepId, bundle: CompareBundle, its: GivenInput) -> Compared:
        """Compare `its` fingerprint, of the checker's `bundle`, with those of the inputs in its place.

        A tensor that was not used has done no harm, and is not named.
        """
        place = (bundle.id, bundle.border, bundle.back)
        alike: dict[str, bool] = {}
        apart: dict[str, float] = {}
        for seen in self._of(step).seen:
            if (seen.key.id, seen.border, seen.back) == place and not seen.key.check and seen.marks:
                same = seen.exact == its.exact and distance(seen.marks, its.marks) <= self._tolerance
                alike[seen.sender] = alike.get(seen.sender, True) and same
                off = difference(seen.marks, its.marks) if seen.exact == its.exact else UNLIKE
                apart[seen.sender] = max(apart.get(seen.sender, 0.0), min(off, UNLIKE))
        return Compared(
            line=step.line,
            step=step.number,
            check=bundle.check,
            id=bundle.id,
            border=bundle.border,
            back=bundle.back,
            peer=bundle.peer,
            alike=tuple(sender for sender, same in sorted(alike.items()) if same),
            differ=(differ := tuple(sender for sender, same in sorted(alike.items()) if not same)),
            apart=tuple(apart[sender] for sender in differ),
        )

    def show(self, step: StepId, check: int) -> tuple[Given, ...]:
        """Inputs of what was computed for spot check `check`; 0: inputs of what we count."""
        theirs = [seen for seen in self._of(step).seen if seen.key.check == check and seen.digest]
        return tuple(
            Given(id=seen.key.id, begin=seen.key.begin, back=seen.back, peer=seen.sender, digest=seen.digest)
            for seen in theirs[:MOST_SHOWN]
        )

    def end_step(self, step: StepId) -> None:
        """Forget `step`: no coordinator asks for it any more."""
        self._steps.pop(step, None)


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
    """(holder, range and key that the plan names) → fingerprint of what the holder has sent of it."""


class ReceivedParts:
    """The parts that one reducer has added up. `draw` gives a fresh key."""

    def __init__(self, draw: Callable[[], bytes]) -> None:
        self._draw = draw
        self._plans: dict[tuple[StepId, int], _Plan] = {}

    def key(self, step: StepId, plan: int) -> bytes:
        """The key under which parts of that plan are fingerprinted."""
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
