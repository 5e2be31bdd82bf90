"""Commands for the flat vectors that peers reduce: export, sum, fingerprint, inspection, and update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from hetpeer.stages.block.fingerprint import KEY_BYTES
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.worker_messages import (
    Command,
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
    """Encoding of a piece of a reduced vector of `block`, from element `begin` on (vector_sums.py)."""

    codec: Name
    plan: Count
    block: Count
    begin: Count
    keeps: Name = ""
    """Key under which the rounding error is kept: one of GRADIENTS or PARAMETERS, of parts or of sums."""
    parts: Annotated[int, Field(ge=1, lt=1 << 32)] = 1
    """Parts in the sum; the rounding error concerns their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marking:
    """Fingerprinting of the elements [begin, end) of a vector of `block` (fingerprint.py)."""

    block: Count
    begin: Count
    end: Count
    key: Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class ExportSlot(Command[VectorExported], kind="export_slot"):
    """Copy elements [begin, end) of a step's slot into `extent`, as float32 or as `rounding` says."""

    step: Count
    block: Count
    slot: Count
    begin: Count
    end: Count
    extent: Extent
    rounding: Rounding | None = None


class ExportState(Command[VectorExported], kind="export_state"):
    """The same with the block's parameters and statistics, or with their `copy`."""

    block: Count
    begin: Count
    end: Count
    extent: Extent
    copy: bool = False
    rounding: Rounding | None = None


class ExportMovement(Command[VectorExported], kind="export_movement"):
    """Copy what clusters send of the movement of elements [begin, end) into `extent`, in the codec of
    movements; or with `decoded` as float32, as the others decode it.

    `begin` is a multiple of the codec's window (sparse_movement.py).
    """

    block: Count
    begin: Count
    end: Count
    extent: Extent
    decoded: bool = False


class CopyBlock(Command[Done], kind="keep_copy"):
    """Copy the block's parameters and statistics: a delayed averaging begins while updates go on."""

    block: Count


class DropCopies(Command[Done], kind="drop_copies"):
    """Forget the copies of all blocks: the averaging is over."""


class SumVectors(Command[Summed], kind="sum"):
    """Float32 sum of `parts` in the given order, into `into`: the first is copied, the others are added one
    by one.

    With a `rounding` the sum is also encoded into `rounded`, and `into` holds the decoded values.
    """

    parts: Annotated[tuple[Extent, ...], Field(min_length=1)]
    into: Extent
    elements: Count
    rounding: Rounding | None = None
    rounded: Extent | None = None
    begin: Count = 0
    """Index of the first element in its block."""
    markings: tuple[Marking, ...] = ()
    """Fingerprint every part as well, in each of these ways."""
    closely: bool = False
    """Find each part's digest as well."""
    robust: bool = False
    """Clip parts far from the others (vector_sums.py); the result is that mean times the number of parts."""
    movements: bool = False
    """The parts are of movements, most of which is not sent (movement_sums.py)."""


class MarkSlot(Command[Marked], kind="mark_slot"):
    """Fingerprint elements of a step's slot."""

    step: Count
    slot: Count
    marking: Marking


class MarkVector(Command[Marked], kind="mark_vector"):
    """Fingerprint elements of a float32 vector in consecutive `pieces`, from element `begin` of its block."""

    pieces: tuple[Extent, ...]
    begin: Count
    marking: Marking


class InspectVector(Command[Inspected], kind="inspect"):
    """Digest, norm and finiteness of `elements` float32 values, and of each of `pieces`.

    Elements in the ranges [begin, end) of `normed` count for the norm, and those of each of `groups` for the
    norm of that group.
    """

    extent: Extent
    elements: Count
    normed: tuple[tuple[Count, Count], ...]
    groups: tuple[tuple[tuple[Count, Count], ...], ...] = ()
    pieces: tuple[Extent, ...] = ()


class InspectSlot(Command[Inspected], kind="inspect_slot"):
    """The same of a step's slot where it lies; `Apply` may name it then, as long as it does not change."""

    step: Count
    block: Count
    slot: Count
    normed: tuple[tuple[Count, Count], ...]
    groups: tuple[tuple[tuple[Count, Count], ...], ...] = ()


class Apply(Command[UpdateApplied], kind="apply"):
    """Update `block` with the committed gradient of a step of `microbatches`, times `coefficient` (clipping).

    `batch` is the number of the trained batch, from 0: the place in the schedule. The block's version is the
    number of the step, whose slots and kept graphs are forgotten. Versions from `needed` on are kept for work
    under way. The gradient is in an extent, or is an inspected slot of the step. One that is not finite is
    refused before anything changes.
    """

    block: Count
    gradient: Extent | None = None
    slot: Count | None = None
    """The step's slot that is the gradient; None: it is in `gradient`."""
    coefficient: Number
    plan: Count
    """The reduce plan of the gradient."""
    batch: Count
    microbatches: Count
    skipped: tuple[Count, ...] = ()
    """Ids of the step that the gradient does not have: nobody can compute them."""
    needed: Count
    base: Count
    """The version of the parameters for which the gradient was computed."""
    compensation: Number = 0.0
    """λ of DC-ASGD (Zheng et al., ICML 2017, Eq. 10), used if that is not the newest version."""
    workers: Annotated[int, Field(ge=1, lt=1 << 32)] = 1
    """Updates whose mean will be taken."""


class Install(Command[UpdateApplied], kind="install"):
    """Set the parameters and statistics of `block` to `total` · `coefficient`, after an averaging of
    clusters.

    An outer rule, if any, is applied to that. Changes since `CopyBlock`, and what the block's parameters lost
    in transfer under `plan`, are added. Numbers that are not finite are refused before anything changes.
    """

    block: Count
    total: Extent
    coefficient: Number
    plan: Count
    needed: Count | None = None
    """The oldest version that is kept, for work under way; None: only the new one is."""
