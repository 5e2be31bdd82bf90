"""What a reducer has received of whom, as fingerprints: kept until the step ends, in case that a spot check asks (docs/trust.md).

Of every plan under a key of its own, that nobody else hears before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hetpeer.averaging.effects import Shard, StepId
from hetpeer.averaging.messages import Mark
from hetpeer.stages.execution.fingerprint import Fingerprint, pack


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


class Received:
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

    def add(self, step: StepId, shard: Shard, holder: str, marks: Fingerprint) -> None:
        """`marks` are those of `holder`'s part of `shard`. The shards of a reducer are neighbours."""
        parts = self._plan(step, shard.plan).parts
        known = parts.get((holder, shard.block))
        if known is None:
            parts[holder, shard.block] = _Range(shard.begin, shard.end, marks)
            return
        known.begin, known.end = min(known.begin, shard.begin), max(known.end, shard.end)
        known.marks = known.marks + marks

    def of(self, step: StepId, plan: int, holder: str) -> tuple[Mark, ...]:
        """What `holder` has sent us under `plan`."""
        known = self._plans.get((step, plan))
        if known is None:
            return ()
        return tuple(
            Mark(block=block, begin=one.begin, end=one.end, key=known.key, values=pack(one.marks))
            for (peer, block), one in sorted(known.parts.items())
            if peer == holder
        )

    def end_step(self, step: StepId) -> None:
        """Nobody will ask for it any more."""
        self._plans = {named: plan for named, plan in self._plans.items() if named[0] != step}
