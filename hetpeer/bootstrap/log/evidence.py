"""Evidence: the volunteers' signed logs, read and checked line by line.

Each line's signature and run are checked here. What the lines prove is decided by the audit (audit/audit.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from hetpeer.bootstrap.log.volunteer_log import Record, read_event, read_events
from hetpeer.bootstrap.run.manifest_files import Digest
from hetpeer.bootstrap.run.owner_signature import Count, PeerId, Positive
from hetpeer.bootstrap.run.settings import CodecName
from hetpeer.dht.base.errors import ProtocolError

Key = tuple[int, int, int, int, int]
"""Cluster, view, step, plan and block of an applied update."""


FoldingOrder = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
"""(holder, runs) of each slot of a sum. The ids of a run are added to each other, then the runs, then the
slots, each from left to right."""


def order_of(
    cover: Sequence[tuple[str, Sequence[int]]], runs: Sequence[Sequence[int]]
) -> FoldingOrder | None:
    """Order of a cover's slots (holder, ids), from the `runs` beside it; None if these do not fit."""
    if len(runs) != len(cover):
        return None
    slots = []
    for (holder, ids), lengths in zip(cover, runs, strict=True):
        if sum(lengths) != len(ids):
            return None
        left = iter(ids)
        slots.append((holder, tuple(tuple(islice(left, length)) for length in lengths)))
    return tuple(slots)


CodedBundles = tuple[CodecName, list[Positive], list[Count]]
"""Codec, the elements that it kept of each tensor (none: all), and the ids of the bundles."""


class AppliedEvent(BaseModel):
    """A volunteer's statement that it updated a block by the sum of `cover`; `group` > 0: an averaging."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["applied"]
    run: str
    peer: PeerId
    incarnation: Count
    term: Count
    view: Count
    cluster: Count = 0
    step: Count
    base: Count | None = None
    """Version of the parameters that the gradient was computed with; None: not stated, the newest."""
    group: Count = 0
    block: Count
    plan: Count
    cover: list[tuple[str, list[Count]]]
    """Slots of the reduce plan: holder, microbatch ids."""
    runs: list[list[Count]] = Field(default_factory=list)
    """Lengths of the runs in which each slot's ids were added (`Cover.runs`); empty: not known."""
    entered: list[CodedBundles] = Field(default_factory=list)
    """How the activations were coded from which the writer has computed the block; others: not at all."""
    returned: list[CodedBundles] = Field(default_factory=list)
    """The same of the gradients that came back to the block."""
    passed_on: list[CodedBundles] = Field(default_factory=list)
    """The same of the activations that the writer sent from the block to the next one."""
    given_back: list[CodedBundles] = Field(default_factory=list)
    """The same of the gradients that it sent to the block before."""
    arithmetic: Annotated[str, Field(max_length=200)] = ""
    """Text on all that decides last bits on the writer's machine (arithmetic.py); empty: not stated."""
    gradient: Digest
    state: Digest

    @property
    def key(self) -> Key:
        """Cluster, view, step, plan and block of the update."""
        return self.cluster, self.view, self.step, self.plan, self.block

    @property
    def counts(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Slots in a fixed order."""
        return tuple(sorted((holder, tuple(sorted(ids))) for holder, ids in self.cover))

    @property
    def order(self) -> FoldingOrder | None:
        """Slots and runs in the order in which they were added; None if the line does not say."""
        return order_of(self.cover, self.runs)

    @property
    def says(self) -> tuple[object, ...]:
        """Fields that must be equal for all holders that applied the same update."""
        base = self.step if self.base is None else self.base
        return base, self.order or self.counts, self.gradient, self.state

    def tally(self) -> Counter[int]:
        """Microbatch (or cluster) → how often the applied sum contains it."""
        return Counter(microbatch for _, ids in self.cover for microbatch in ids)


class LeftoverEvent(BaseModel):
    """A volunteer's statement that it found `sender`'s leftovers for block `border` on the task board."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["leftover"]
    run: str
    peer: PeerId
    view: Count
    cluster: Count = 0
    step: Count
    border: Count
    sender: PeerId
    ids: list[Count]


Event = AppliedEvent | LeftoverEvent
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])
_KINDS = ("applied", "leftover")


@dataclass(slots=True)
class Evidence:
    """All statements of a run's volunteers, and the malformed lines."""

    volunteers: int = 0
    applied: dict[Key, list[AppliedEvent]] = field(default_factory=lambda: defaultdict(list))
    lives: dict[str, list[AppliedEvent]] = field(default_factory=dict)
    """Volunteer → its `applied` statements, in the order of its log."""
    found: list[LeftoverEvent] = field(default_factory=list)
    unsound: list[str] = field(default_factory=list)
    """Lines that do not count, with the reason."""

    @classmethod
    def read(cls, folder: Path, run_id: str) -> Evidence:
        """Evidence in `folder`, which has one log per volunteer, named by its peer id."""
        testimony = cls()
        for path in sorted(folder.glob("*.jsonl")):
            testimony.volunteers += 1
            for number, line in read_events(path):
                try:
                    event = _read(line, path.stem, run_id)
                except (ProtocolError, ValidationError) as error:
                    why = error.what if isinstance(error, ProtocolError) else "not a valid event"
                    testimony.unsound.append(f"{path.name} line {number}: {why}")
                    continue
                if isinstance(event, AppliedEvent):
                    testimony.applied[event.key].append(event)
                    testimony.lives.setdefault(event.peer, []).append(event)
                elif event is not None:
                    testimony.found.append(event)
        return testimony

    @property
    def updates(self) -> int:
        """Number of stated updates of blocks."""
        return sum(map(len, self.lives.values()))


def _read(line: str, peer: str, run_id: str) -> Event | None:
    """Event of a line, or None for other kinds of event."""
    return read_record(*read_event(line), peer, run_id)


def read_record(signer: str, record: Record, peer: str, run_id: str) -> Event | None:
    """Event that `signer` wrote into `peer`'s log. Raises `ProtocolError`, `ValidationError` if invalid."""
    if record.get("kind") not in _KINDS:
        return None
    event = _EVENT.validate_python(record)
    if not signer == event.peer == peer:
        raise ProtocolError(f"signed by {signer}, in the log of {peer}")
    if event.run != run_id:
        raise ProtocolError(f"of another run, {event.run[:40]}")
    return event
