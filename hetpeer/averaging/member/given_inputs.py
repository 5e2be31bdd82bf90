"""What others have given a holder in a step, as far as spot checks may ask for it: the bundles and gradients that it has computed from (docs/trust.md).

Of each a fingerprint, under a key of the step that nobody else ever hears: it is compared with what a checker sends in its place. And a digest: two who
have computed from the same can show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import StepId
from hetpeer.stages.block.fingerprint import distance
from hetpeer.stages.pipeline.effects import CompareBundle, TaskKey

MOST = 1 << 13
"""Digests that are shown at a time."""


@dataclass(slots=True)
class GivenInput:
    """A bundle of `sender`. Its fingerprint and its digest may be known later only; `exact` is that of numbers that are not rounded."""

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
    """`draw` gives a fresh key; two fingerprints that are not farther apart than `tolerance` are of the same."""

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
        """`key` is computed from the bundle that enters `border`, or its gradient, of `sender`."""
        seen = GivenInput(key, border, back, sender)
        self._of(step).seen.append(seen)
        return seen

    def compared(self, step: StepId, bundle: CompareBundle, its: GivenInput) -> m.Compared:
        """What follows from `its` fingerprint, that of the checker's `bundle`. What was not used has done nobody harm."""
        place = (bundle.id, bundle.border, bundle.back)
        alike: dict[str, bool] = {}
        for seen in self._of(step).seen:
            if (seen.key.id, seen.border, seen.back) == place and not seen.key.check and seen.marks:
                same = seen.exact == its.exact and distance(seen.marks, its.marks) <= self._tolerance
                alike[seen.sender] = alike.get(seen.sender, True) and same
        return m.Compared(
            line=step.line,
            step=step.number,
            check=bundle.check,
            id=bundle.id,
            border=bundle.border,
            back=bundle.back,
            peer=bundle.peer,
            alike=tuple(sender for sender, same in sorted(alike.items()) if same),
            differ=tuple(sender for sender, same in sorted(alike.items()) if not same),
        )

    def show(self, step: StepId, check: int) -> tuple[m.Given, ...]:
        """What was used for `check`; 0: for what we count ourselves."""
        theirs = [seen for seen in self._of(step).seen if seen.key.check == check and seen.digest]
        return tuple(
            m.Given(
                id=seen.key.id, begin=seen.key.begin, back=seen.back, peer=seen.sender, digest=seen.digest
            )
            for seen in theirs[:MOST]
        )

    def end_step(self, step: StepId) -> None:
        """Nobody will ask for it any more."""
        self._steps.pop(step, None)
