"""Fencing for tensors: take one now, hold it back until the message that explains it is here, or drop it.

Pure. Peers are not in step with each other: an activation of a step may arrive before our own Begin, a part of a plan
before our own Plan. Whatever is of another line of history, of an earlier step or plan, or from an incarnation that is
not in the roster, changes nothing (docs/protocol.md).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from hetpeer.averaging.effects import StepId
from hetpeer.averaging.messages import EVERYBODY, Line
from hetpeer.stages.execution.effects import Handle

MAX_EARLY = 4096
"""Tensors held back at most; beyond that the newest are dropped (their senders still keep them)."""


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


def due_outside(origin: Origin, line: Line, version: int | None, group: tuple[int, int]) -> Due:
    """For a tensor of another step than the one in progress: it may still begin here. `group`: term and number of the last
    group that averaged here.
    """
    theirs, number = origin.step.line, origin.step.number
    if theirs.cluster == EVERYBODY:
        return Due.LATER if (theirs.term, number) > max(group, (line.term, 0)) else Due.NEVER
    if theirs.cluster != line.cluster:
        return Due.NEVER
    if (theirs.term, theirs.view) > (line.term, line.view):
        return Due.LATER
    return Due.LATER if theirs == line and (version is None or number >= version) else Due.NEVER


Step = TypeVar("Step")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Waiting(Generic[Step, Result]):
    """A tensor that is held back; `accept` takes it."""

    origin: Origin
    accept: Callable[[Step], Result]
    handle: Handle


class EarlyTensors(Generic[Step, Result]):
    """The tensors that wait, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: list[Waiting[Step, Result]] = []

    def hold(self, tensor: Waiting[Step, Result]) -> bool:
        """Keep `tensor` for later. False: there is no room for it."""
        if len(self._waiting) >= MAX_EARLY:
            return False
        self._waiting.append(tensor)
        return True

    def forget(self, step: StepId) -> None:
        """`step` is over here, and with it the memory of its tensors. Who comes into it again is sent anew what it lacks."""
        self._waiting = [tensor for tensor in self._waiting if tensor.origin.step != step]

    def take(self) -> list[Waiting[Step, Result]]:
        """All of them, to be looked at again."""
        waiting, self._waiting = self._waiting, []
        return waiting
