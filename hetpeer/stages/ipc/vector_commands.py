"""Commands for the flat vectors that peers reduce: what is exported, summed, fingerprinted and looked at, and what comes of the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hetpeer.stages.block.fingerprint import KEY_BYTES
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.command import Command
from hetpeer.stages.ipc.results import (
    Count,
    Done,
    Inspected,
    Marked,
    Name,
    Number,
    Summed,
    UpdateApplied,
    VectorExported,
)

GRADIENTS = "gradient", "sum of gradients"
PARAMETERS = "parameters", "sum of parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """How a piece of a reduced vector of `block`, from element `begin` on, is written (codec_loss.py)."""

    codec: Name
    plan: Count
    block: Count
    begin: Count
    keeps: Name = ""
    """What is lost is kept by this name: one of GRADIENTS or PARAMETERS, of parts or of sums."""
    parts: Annotated[int, Field(ge=1, lt=1 << 32)] = 1
    """It is the sum of so many, and what is lost concerns their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marking:
    """How the elements [begin, end) of a vector of `block` are fingerprinted (fingerprint.py)."""

    block: Count
    begin: Count
    end: Count
    key: Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSlot(Command[VectorExported]):
    """Copy the elements [begin, end) of a step's slot, a flat float32 vector, into `extent`; if they are rounded, as their codec writes them."""

    answer: ClassVar[type[Any]] = VectorExported
    kind: Literal["export_slot"] = "export_slot"
    step: Count
    block: Count
    slot: Count
    begin: Count
    end: Count
    extent: Extent
    rounding: Rounding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportState(Command[VectorExported]):
    """The same with the block's parameters and statistics, or the `copy` of them."""

    answer: ClassVar[type[Any]] = VectorExported
    kind: Literal["export_state"] = "export_state"
    block: Count
    begin: Count
    end: Count
    extent: Extent
    copy: bool = False
    rounding: Rounding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBlock(Command[Done]):
    """Copy the block's parameters and statistics as they are: a delayed averaging begins, and updates go on."""

    kind: Literal["keep_copy"] = "keep_copy"
    block: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCopies(Command[Done]):
    """Forget the copies of all blocks: the averaging is over."""

    kind: Literal["drop_copies"] = "drop_copies"


@dataclass(frozen=True, slots=True, kw_only=True)
class SumVectors(Command[Summed]):
    """Float32 sum of `parts` in the order given, into `into`: the first is copied, the others are added one by one.

    With a `rounding` the sum is written to `rounded` by its codec, and `into` is what others read there.
    """

    answer: ClassVar[type[Any]] = Summed
    kind: Literal["sum"] = "sum"
    parts: Annotated[tuple[Extent, ...], Field(min_length=1)]
    into: Extent
    elements: Count
    rounding: Rounding | None = None
    rounded: Extent | None = None
    begin: Count = 0
    """Where in its block the first element is."""
    markings: tuple[Marking, ...] = ()
    """Fingerprint every part as well, in each of these ways."""
    robust: bool = False
    """What is far from the others is clipped (robust_mean.py): as many times that mean as there are parts, in place of the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkSlot(Command[Marked]):
    """Fingerprint elements of a step's slot."""

    answer: ClassVar[type[Any]] = Marked
    kind: Literal["mark_slot"] = "mark_slot"
    step: Count
    slot: Count
    marking: Marking


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkVector(Command[Marked]):
    """Fingerprint elements of a float32 vector that lies in `pieces`, one behind the other, from element `begin` of its block on."""

    answer: ClassVar[type[Any]] = Marked
    kind: Literal["mark_vector"] = "mark_vector"
    pieces: tuple[Extent, ...]
    begin: Count
    marking: Marking


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectVector(Command[Inspected]):
    """Look at `elements` float32 values; those in the ranges [begin, end) of `normed` count for the norm. Then at each of `pieces`."""

    answer: ClassVar[type[Any]] = Inspected
    kind: Literal["inspect"] = "inspect"
    extent: Extent
    elements: Count
    normed: tuple[tuple[Count, Count], ...]
    pieces: tuple[Extent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply(Command[UpdateApplied]):
    """Update `block` with the committed gradient of a step of so many microbatches, times `coefficient` (clipping). `batch`
    is what was trained, from 0: the place in the schedule.

    The block is at the version whose number is the step's, whose slots and kept graphs are forgotten. Versions from `needed` on are kept, as
    something is still computed with them. A gradient that is not finite is refused before anything changes.
    """

    answer: ClassVar[type[Any]] = UpdateApplied
    kind: Literal["apply"] = "apply"
    block: Count
    gradient: Extent
    coefficient: Number
    plan: Count
    """By which the gradient was reduced."""
    batch: Count
    microbatches: Count
    needed: Count
    base: Count
    """The version of the parameters of which it is the gradient."""
    compensation: Number = 0.0
    """λ of DC-ASGD (Zheng et al., ICML 2017, Eq. 10), where that is not the newest version."""
    workers: Annotated[int, Field(ge=1, lt=1 << 32)] = 1
    """Of so many updates the mean will be taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Install(Command[UpdateApplied]):
    """The parameters and statistics of `block` are `total`·`coefficient` from now on, or what the outer rule makes of that: clusters have averaged.
    What has changed since its `CopyBlock` is added, and what its parameters have lost on their way under `plan`.

    Slots and kept graphs are forgotten. Numbers that are not finite are refused before anything changes.
    """

    answer: ClassVar[type[Any]] = UpdateApplied
    kind: Literal["install"] = "install"
    block: Count
    total: Extent
    coefficient: Number
    plan: Count
