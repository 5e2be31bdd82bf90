"""Fencing for tensors: take one now, hold it back until the message that explains it is here, or drop it.

Pure. Peers are not in lockstep: an activation of a step may arrive before our own Begin, a part of a plan
before our own Plan. A tensor of another term-view, of an earlier step or plan, or from an incarnation that is
not in the roster changes nothing (docs/protocol.md).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetpeer.averaging.effects import Effect, StepId
from hetpeer.averaging.member.position import Position
from hetpeer.averaging.messages import EVERYBODY
from hetpeer.stages.pipeline.effects import Handle

MAX_EARLY = 4096
"""Tensors held back at most; beyond that one is dropped (`EarlyTensors.hold`)."""
NEAR = 64
"""Steps that others may be ahead of us. In fact it is one or two, or as many as overlap: nobody is in a step
before everybody has reported ready for it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Sender of a tensor, its step, and its plan: None for activations and gradients."""

    sender: str
    incarnation: int
    step: StepId
    plan: int | None = None


class Due(enum.Enum):
    """Decision on an arrived tensor: take it now, later or never."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


def due_outside(origin: Origin, position: Position, *, partner: bool) -> Due:
    """Decision on a tensor of a step that is not in progress at `position`: it may still begin here.

    `partner`: the sender has lately worked with us. Only a partner is believed that there is a later
    term-view that we have not heard of.
    """
    line, version = position.line, position.version
    theirs, number = origin.step.line, origin.step.number
    believed = partner or not line.term
    if theirs.cluster == EVERYBODY:
        newer = (theirs.term, number) > max(position.group, (line.term, 0))
        due = newer and (believed or theirs.term == line.term)
    elif theirs.cluster != line.cluster or (version is not None and number > version + NEAR):
        due = False
    elif (theirs.term, theirs.view) > (line.term, line.view):
        due = believed
    else:
        due = theirs == line and (version is None or number >= version)
    return Due.LATER if due else Due.NEVER


@dataclass(frozen=True, slots=True)
class EarlyTensor:
    """A tensor that is held back; `accept` takes it. `partner`: its sender works with us, or lately did."""

    origin: Origin
    accept: Callable[[Any], list[Effect]]
    handle: Handle
    partner: bool


class EarlyTensors:
    """The tensors that are held back, in the order of their arrival."""

    def __init__(self) -> None:
        self._waiting: list[EarlyTensor] = []
        self._shares: Counter[tuple[bool, str]] = Counter()
        """(whether the sender is a stranger, sender) → tensors held back."""

    def hold(self, tensor: EarlyTensor) -> EarlyTensor | None:
        """Keep `tensor` for later. Without room, drop and return the newest tensor of the fullest sender.

        That may be `tensor` itself. Partners lose tensors only when no stranger has any. The sender of a
        dropped tensor takes it for delivered.
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
        """Drop the tensors of `step`, which is over here, and their memory freed.

        A volunteer that enters the step again is sent anew what it lacks.
        """
        self._waiting = [tensor for tensor in self._waiting if tensor.origin.step != step]
        self._shares = Counter(map(_share_of, self._waiting))

    def take(self) -> list[EarlyTensor]:
        """Remove and return all held tensors, to be looked at again."""
        waiting, self._waiting = self._waiting, []
        self._shares.clear()
        return waiting


def _share_of(tensor: EarlyTensor) -> tuple[bool, str]:
    return not tensor.partner, tensor.origin.sender
