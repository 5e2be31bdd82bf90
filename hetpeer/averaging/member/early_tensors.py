"""Fencing for tensors: take one now, hold it back until the message that explains it is here, or drop it.

Pure. Peers are not in step with each other: an activation of a step may arrive before our own Begin, a part of a plan
before our own Plan. Whatever is of another line of history, of an earlier step or plan, or from an incarnation that is
not in the roster, changes nothing (docs/protocol.md).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from hetpeer.averaging.effects import StepId
from hetpeer.averaging.messages import EVERYBODY, Line
from hetpeer.stages.pipeline.effects import Handle

MAX_EARLY = 4096
"""Tensors held back at most; beyond that one has to go (`EarlyTensors.hold`)."""
NEAR = 64
"""Steps that others may be ahead of us. Who is in a step has said that it is ready for it, so it is one or two, or as many as overlap."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor came from and what it belongs to; `plan` is None for activations and gradients."""

    sender: str
    incarnation: int
    step: StepId
    plan: int | None = None


class Due(enum.Enum):
    """When a tensor is to be taken."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


def due_in_step(
    origin: Origin, incarnations: Mapping[str, int], gone: Mapping[str, int], plan: int | None
) -> Due:
    """For a tensor of the step in progress; `plan` is the newest plan that we know, `gone` the last incarnations of those
    who left. Who is not in the roster may be about to introduce itself.
    """
    known = incarnations.get(origin.sender)
    if known is None:
        return Due.LATER if origin.incarnation >= gone.get(origin.sender, 0) else Due.NEVER
    if known != origin.incarnation:
        return Due.NEVER
    if origin.plan is None or origin.plan == plan:
        return Due.NOW
    return Due.LATER if plan is None or origin.plan > plan else Due.NEVER


def due_outside(
    origin: Origin, line: Line, version: int | None, group: tuple[int, int], *, partner: bool
) -> Due:
    """For a tensor of another step than the one in progress: it may still begin here. `group`: term and number of the last
    group that averaged here. `partner`: whether its sender has lately worked with us; nobody else is believed that there is a
    line of history which we have not heard of.
    """
    theirs, number = origin.step.line, origin.step.number
    of_now = partner or not line.term
    if theirs.cluster == EVERYBODY:
        due = (theirs.term, number) > max(group, (line.term, 0)) and (of_now or theirs.term == line.term)
    elif theirs.cluster != line.cluster or (version is not None and number > version + NEAR):
        due = False
    elif (theirs.term, theirs.view) > (line.term, line.view):
        due = of_now
    else:
        due = theirs == line and (version is None or number >= version)
    return Due.LATER if due else Due.NEVER


Step = TypeVar("Step")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Waiting(Generic[Step, Result]):
    """A tensor that is held back; `accept` takes it. `partner`: its sender works with us, or lately did."""

    origin: Origin
    accept: Callable[[Step], Result]
    handle: Handle
    partner: bool


class EarlyTensors(Generic[Step, Result]):
    """The tensors that wait, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: list[Waiting[Step, Result]] = []
        self._shares: Counter[tuple[bool, str]] = Counter()
        """Is it a stranger's, whose → how many."""

    def hold(self, tensor: Waiting[Step, Result]) -> Waiting[Step, Result] | None:
        """Keep `tensor` for later. Where there is no room the newest goes of whoever has the most, which may be `tensor`
        itself, and a partner's only when no stranger's is left: it is returned. Its sender takes it for delivered.
        """
        self._waiting.append(tensor)
        own = _share_of(tensor)
        self._shares[own] += 1
        if len(self._waiting) <= MAX_EARLY:
            return None
        most = max(self._shares, key=lambda share: (share[0], self._shares[share], share == own))
        place = next(i for i in reversed(range(len(self._waiting))) if _share_of(self._waiting[i]) == most)
        self._shares -= Counter([most])
        return self._waiting.pop(place)

    def forget(self, step: StepId) -> None:
        """`step` is over here, and with it the memory of its tensors. Who comes into it again is sent anew what it lacks."""
        self._waiting = [tensor for tensor in self._waiting if tensor.origin.step != step]
        self._shares = Counter(map(_share_of, self._waiting))

    def take(self) -> list[Waiting[Step, Result]]:
        """All of them, to be looked at again."""
        waiting, self._waiting = self._waiting, []
        self._shares.clear()
        return waiting


def _share_of(tensor: Waiting[Step, Result]) -> tuple[bool, str]:
    return not tensor.partner, tensor.origin.sender
