"""The compute worker's answers, one class for each kind.

`CommandFailed` may answer any command; otherwise each command names the class of its answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hetpeer.dht.base.errors import ExitCode, HetpeerError, LocalError
from hetpeer.stages.block.fingerprint import NBYTES
from hetpeer.stages.links.codec import EncodedTensor

Count = Annotated[int, Field(ge=0, lt=1 << 48, strict=True)]
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Name = Annotated[str, Field(max_length=256, strict=True)]
Marks = Annotated[bytes, Field(min_length=NBYTES, max_length=NBYTES, strict=True)]
DIGEST_BYTES = 16
Short = Annotated[bytes, Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES, strict=True)]
NO_MEMORY = "HP-MEM-002"
"""Code of the answer when the device lacks memory for a command."""
MAX_TEXT = 1000
Text = Annotated[str, Field(max_length=MAX_TEXT, strict=True)]
"""Text for people, bounded: the worker runs graphs from the net, and its texts go into the daemon's log."""
Setting = bool | int | Number | Name | tuple[Number, ...] | tuple[tuple[Number, Number], ...]
"""One setting of the update rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The command was carried out; there is nothing to report."""

    kind: Literal["done"] = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFailed:
    """The command was not carried out and changed nothing; code, what, why and fix as in `HetpeerError`."""

    kind: Literal["failed"] = "failed"
    code: Name
    what: Text
    why: Text
    fix: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrepared:
    """The block's graph is checked and kept. `dump_bytes`: most bytes that `DumpState` needs."""

    kind: Literal["prepared"] = "prepared"
    dump_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The block's state is loaded: its version, and the digest of its bits (`BlockState.digest`)."""

    kind: Literal["loaded"] = "loaded"
    version: Count
    digest: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """The outputs are in their extents; `loss` if the range ends in it. `seconds` of wall time."""

    kind: Literal["forwarded"] = "forwarded"
    loss: Number | None
    seconds: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Backpropagated:
    """The gradients are folded, the input gradients in their extents. `seconds` of wall time."""

    kind: Literal["backpropagated"] = "backpropagated"
    seconds: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorExported:
    """The elements are in the extent, as their codec writes them if `rounded`, else float32."""

    kind: Literal["exported"] = "exported"
    rounded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """The sum is in the extent, as its codec writes it if `rounded`.

    If it is not all finite, `unsound` are the indices of the parts that are not.
    """

    kind: Literal["summed"] = "summed"
    unsound: tuple[Count, ...]
    rounded: bool = False
    marks: tuple[Marks, ...] = ()
    """Fingerprints of the parts, if asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """The fingerprint (fingerprint.py)."""

    kind: Literal["marked"] = "marked"
    marks: Marks


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleMarked:
    """Fingerprint of all rounded numbers, digest of all others, and digest of the whole."""

    kind: Literal["bundle_marked"] = "bundle_marked"
    marks: Marks
    exact: Short
    digest: Short


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """Blake3 (hex) of the bytes, sum of squares in float64 (exact_numerics.py), and whether all values are
    finite.

    `pieces`: (digest, finite) of each piece. `seconds` of wall time.
    """

    kind: Literal["inspected"] = "inspected"
    digest: Name
    squared_norm: float
    finite: bool
    seconds: Number
    pieces: tuple[tuple[Name, bool], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateApplied:
    """The block's new version and the digest of its new state. `seconds` of wall time."""

    kind: Literal["applied"] = "applied"
    version: Count
    digest: Name
    seconds: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Dumped:
    """Bytes written: the state as a safetensors file (block_state.py)."""

    kind: Literal["dumped"] = "dumped"
    nbytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Bytes written, and the head's entry for each tensor."""

    kind: Literal["encoded"] = "encoded"
    nbytes: Count
    written: tuple[EncodedTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmedUp:
    """Measured float32 matrix multiplication speed."""

    kind: Literal["warmed_up"] = "warmed_up"
    flops_per_second: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """Seconds of forward and backward of one full microbatch."""

    kind: Literal["rehearsed"] = "rehearsed"
    seconds: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """The worker's present condition.

    `device_uuid`: the GPU's by NVML; empty on a CPU. `device_bytes`: memory that torch holds on the GPU (0 on
    a CPU), not counted in `device_free_bytes`.
    """

    kind: Literal["worker_info"] = "worker_info"
    device: Name
    device_name: Name
    device_uuid: Name
    threads: Count
    rss_bytes: Count
    device_bytes: Count
    device_free_bytes: Count
    device_total_bytes: Count
    blocks: tuple[Count, ...]
    tasks: Count


Result = (
    Done
    | CommandFailed
    | BlockPrepared
    | Loaded
    | Forwarded
    | Backpropagated
    | VectorExported
    | Summed
    | Marked
    | BundleMarked
    | Inspected
    | UpdateApplied
    | Dumped
    | Encoded
    | WarmedUp
    | Rehearsed
    | WorkerInfo
)


class CommandFailedError(LocalError):
    """The worker answered `CommandFailed`: it lives on, and the command changed nothing."""

    def __init__(self, failed: CommandFailed) -> None:
        status = ExitCode.TOO_SMALL if failed.code == NO_MEMORY else ExitCode.UNEXPECTED
        super().__init__(failed.code, failed.what, why=failed.why, fix=failed.fix, exit_code=status)


def failed(error: HetpeerError) -> CommandFailed:
    """The answer for an error, its texts cut to MAX_TEXT."""
    what, why, fix = (text[:MAX_TEXT] for text in (error.what, error.why, error.fix))
    return CommandFailed(code=error.code, what=what, why=why, fix=fix)
