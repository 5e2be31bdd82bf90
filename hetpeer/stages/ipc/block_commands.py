"""Commands to the compute worker: blocks, microbatches, gradient slots and the worker itself.

Plain frozen values; worker_frames.py puts them on a socket. Tensors never cross it: an `Extent` names their
place in the arena. Commands of one lane are carried out and answered in the order of posting; lanes work at
the same time. A command that failed is answered by `CommandFailed` and has changed nothing; the worker lives
on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hetpeer.stages.graph.random_draws import Draw
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.command import Command
from hetpeer.stages.ipc.results import (
    Backpropagated,
    BlockPrepared,
    Count,
    Done,
    Dumped,
    Forwarded,
    Loaded,
    Name,
    Number,
    Rehearsed,
    Setting,
    WarmedUp,
    WorkerInfo,
)
from hetpeer.stages.ipc.transfer_commands import Decode, Encode, ForgetResiduals, MarkBundle
from hetpeer.stages.ipc.vector_commands import (
    Apply,
    CopyBlock,
    DropCopies,
    ExportSlot,
    ExportState,
    InspectVector,
    Install,
    MarkSlot,
    MarkVector,
    SumVectors,
)

Extents = dict[Name, Extent]
"""Tensor name → its bytes: contiguous, row-major, little-endian, dtype and shape as the block's spec says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareBlock(Command[BlockPrepared]):
    """Check and keep a block's packed graph (graph/block_wire.py), its buffers' raw bytes and its update
    rule.

    `update`: the rule's settings in the manifest; `groups`: differences for some parameters
    (parameter_groups.py); `keeps`: names of what the rules keep for each parameter; `outer`: settings of the
    outer optimizer. The buffers are copied. A block with the same index is forgotten first.
    """

    answer: ClassVar[type[Any]] = BlockPrepared
    kind: Literal["prepare"] = "prepare"
    block: Count
    graph: bytes
    buffers: Extents = field(default_factory=dict)
    update: dict[Name, Setting]
    groups: tuple[tuple[Name, dict[Name, Setting]], ...] = ()
    keeps: tuple[Name, ...]
    outer: dict[Name, Setting] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState(Command[Loaded]):
    """Load the state of a prepared block, a file as in block_state.py, in place of any state and slots it
    had.

    The state is copied: the extent may be released afterwards.
    """

    answer: ClassVar[type[Any]] = Loaded
    kind: Literal["load"] = "load"
    block: Count
    state: Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload(Command[Done]):
    """Forget a block: its graph, state and slots. An absent block is no error."""

    kind: Literal["unload"] = "unload"
    block: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Command[Forwarded]):
    """Run the blocks [begin, end) on one microbatch of `batch` samples; `draw` seeds its random numbers.

    It belongs to `step` and uses the parameters of `version`, the newest or an older one still kept
    (`Apply.needed`). `inputs` are those of block `begin`, `outputs` those of block `end - 1` except the loss,
    `data` the author's inputs that the blocks use. With `train` the graph is kept under `task`; on a CPU it
    refers to the extents of `inputs` and `data`, which must not change until the task's `Backward` or
    `DropTask`.
    """

    answer: ClassVar[type[Any]] = Forwarded
    kind: Literal["forward"] = "forward"
    step: Count
    version: Count
    task: Name
    begin: Count
    end: Count
    batch: Count
    draw: Draw
    inputs: Extents = field(default_factory=dict)
    data: Extents = field(default_factory=dict)
    outputs: Extents = field(default_factory=dict)
    train: bool = True
    sparse: bool = False
    """Zeros of the inputs stand for elements that a codec left out upstream: no gradient goes
    back to them.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Command[Backpropagated]):
    """Backward through the kept graph of `task` in `step`; the graph is forgotten, also on failure.

    `weight` seeds the gradient of the loss (the microbatch's share of the step's samples) if the range ends
    in it. The parameters' gradients and the statistics of the blocks `fold` are added to their slot `slot` of
    the step: all of them, or none on failure.
    """

    answer: ClassVar[type[Any]] = Backpropagated
    kind: Literal["backward"] = "backward"
    step: Count
    task: Name
    output_gradients: Extents = field(default_factory=dict)
    input_gradients: Extents = field(default_factory=dict)
    weight: Number = 1.0
    slot: Count
    fold: tuple[Count, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropTask(Command[Done]):
    """Forget the kept graph of `task` in `step`, if there is one."""

    kind: Literal["drop_task"] = "drop_task"
    step: Count
    task: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSlot(Command[Done]):
    """Add slot `source` to `target` at `block` and forget `source`; without a `target`, `source`
    becomes it.
    """

    kind: Literal["merge_slot"] = "merge_slot"
    step: Count
    block: Count
    source: Count
    target: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class DropSlot(Command[Done]):
    """Forget slot `slot` at `block`, if there is one."""

    kind: Literal["drop_slot"] = "drop_slot"
    step: Count
    block: Count
    slot: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearStep(Command[Done]):
    """Forget every kept graph and every slot of `step`, which is over or was given up."""

    kind: Literal["clear_step"] = "clear_step"
    step: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpState(Command[Dumped]):
    """Write the state of `block` into `extent`, which has at least `BlockPrepared.dump_bytes`."""

    answer: ClassVar[type[Any]] = Dumped
    kind: Literal["dump_state"] = "dump_state"
    block: Count
    extent: Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp(Command[WarmedUp]):
    """Measure the device for at most about a second."""

    answer: ClassVar[type[Any]] = WarmedUp
    kind: Literal["warm_up"] = "warm_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearse(Command[Rehearsed]):
    """Run a prepared block on made-up tensors and time it (rehearsal.py)."""

    answer: ClassVar[type[Any]] = Rehearsed
    kind: Literal["rehearse"] = "rehearse"
    block: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Info(Command[WorkerInfo]):
    """Report the worker's condition."""

    answer: ClassVar[type[Any]] = WorkerInfo
    kind: Literal["info"] = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown(Command[Done]):
    """Answer, then end the process."""

    kind: Literal["shutdown"] = "shutdown"


AnyCommand = (
    PrepareBlock
    | LoadState
    | Unload
    | Forward
    | Encode
    | Decode
    | MarkBundle
    | ForgetResiduals
    | Backward
    | DropTask
    | MergeSlot
    | DropSlot
    | ExportSlot
    | ExportState
    | CopyBlock
    | DropCopies
    | ClearStep
    | SumVectors
    | MarkSlot
    | MarkVector
    | InspectVector
    | Apply
    | Install
    | DumpState
    | WarmUp
    | Rehearse
    | Info
    | Shutdown
)
