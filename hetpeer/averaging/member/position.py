"""A volunteer's position in a run: the place that it chooses, the term-view and state with which it holds it,
and which tensors are of use there. Pure.

A volunteer chooses its place itself, from those that the coordinator offers. Only open places that fit its
memory count. The criteria, in this order: blocks without a holder, since nothing runs without them; places
that serve the run best by the coordinator's policy (bootstrap/state/placement_policy.py); blocks with the
fewest holders; blocks whose holders have left most often, which it can take over without a download (a backup
of the least reliable holder: Ravnest, 3.5.2); the largest place, so that strong machines leave small ones to
others; the first cluster, so that clusters fill up.

Tensors are fenced: one is taken now, held back until the message that explains it is here, or dropped. Peers
are not in lockstep: an activation of a step may arrive before our own Begin, a part of a plan before our own
Plan. A tensor of another term-view, of an earlier step or plan, or from an incarnation that is not in the
roster changes nothing (docs/protocol.md).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import Effect, StepId
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.pipeline.effects import Handle
from hetpeer.stages.pipeline.place_memory import Choice, Offered, choose, room_text


def choose_place(places: Iterable[m.Place], offered: Offered) -> m.Place:
    """The place to claim with what is `offered`. Raises `LocalError` HP-FIT-001 if none fits."""
    choices = [(place, choose(place.demand, offered)) for place in places if place.open]
    fitting = [place for place, choice in choices if choice.fits]
    if not fitting:
        raise _too_small([choice for _, choice in choices], offered)
    return min(
        fitting,
        key=lambda p: (p.holders > 0, p.rank, p.holders, -p.departures, -p.memory_bytes, p.cluster, p.begin),
    )


def _too_small(choices: Sequence[Choice], offered: Offered) -> LocalError:
    """HP-FIT-001, with what the place that lacks the fewest bytes needs and lacks."""
    nearest = min(choices, key=lambda choice: choice.missing.total, default=None)
    why = "no place is open"
    if nearest is not None:
        needed, had, missing = (
            room_text(room, apart=offered.apart) for room in (nearest.room, offered.room, nearest.missing)
        )
        why = f"the nearest needs {needed}, this machine offers {had}: {missing} too little"
    return LocalError(
        "HP-FIT-001",
        "no open place of this run fits into this machine's memory",
        why=why,
        fix="allow more (--ram-limit, --disk-limit, --offload auto; close what else uses the GPU), or ask "
        "the run's author for more and smaller stages",
        exit_code=ExitCode.TOO_SMALL,
    )


@dataclass(slots=True)
class Position:
    """Term-view, place and state. Written by member_life.py alone; position.py fences tensors against it."""

    line: m.TermView = field(default_factory=lambda: m.TermView(term=0, view=0))
    place: m.Range | None = None
    """Blocks [begin, end) that the volunteer holds."""
    version: int | None = None
    """Version of the state in the worker; None while there is none that can be trusted."""
    digests: dict[int, str] = field(default_factory=dict)
    """Block → digest of its state at `version`."""
    group: tuple[int, int] = (0, 0)
    """Term and number of the last group that the volunteer averaged with."""

    def distrust(self) -> None:
        """Note that the worker no longer holds, or will not keep, the state of one known version."""
        self.version, self.digests = None, {}

    def held(self) -> tuple[m.Held, ...]:
        """The states that the volunteer vouches for, as messages name them; () if there is no version."""
        if self.version is None:
            return ()
        version = self.version
        return tuple(m.Held(block=b, version=version, digest=d) for b, d in sorted(self.digests.items()))


# ── fencing ─────────────────────────────────────────────────────────────────────────────────────────────────


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
    if theirs.cluster == m.EVERYBODY:
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
