"""Inputs of a holder in a step, for spot checks: the bundles and gradients that it has computed from
(docs/trust.md).

Each input has a fingerprint under a key of the step that nobody else ever hears: it is compared with the
tensor that a checker sends in its place. Each also has a digest, by which two peers can show that they have
computed from the same tensor.
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

    def compared(self, step: StepId, bundle: CompareBundle, its: GivenInput) -> m.Compared:
        """Compare `its` fingerprint, of the checker's `bundle`, with those of the inputs in its place.

        A tensor that was not used has done no harm, and is not named.
        """
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
        """Inputs of what was computed for spot check `check`; 0: inputs of what we count."""
        theirs = [seen for seen in self._of(step).seen if seen.key.check == check and seen.digest]
        return tuple(
            m.Given(
                id=seen.key.id, begin=seen.key.begin, back=seen.back, peer=seen.sender, digest=seen.digest
            )
            for seen in theirs[:MOST]
        )

    def end_step(self, step: StepId) -> None:
        """Forget `step`: no coordinator asks for it any more."""
        self._steps.pop(step, None)
