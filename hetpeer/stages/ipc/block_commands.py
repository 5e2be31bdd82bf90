"""What the daemon may ask of its compute worker.

Plain frozen values; worker_frames.py puts them on a socket. Tensors never cross here: an `Extent` names their place in the
arena. The commands of one lane are done and answered in the order in which they were posted, lanes are done at the same
time. A command that could not be done is answered by `Failed`, changes nothing, and the worker lives on.
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
"""Tensor name → its bytes: contiguous, row-major, little-endian, dtype and shape as the block says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareBlock(Command[BlockPrepared]):
    """Check (graph/check.py) and keep a block's packed graph (graph/wire.py), its buffers' raw bytes and its update rule.

    `update` are the rule's settings as the manifest has them, `groups` what differs for some parameters (parameter_groups.py), `keeps` names what the
    rules keep of each parameter, `outer` are the settings of what is done with means. The buffers are copied. A block of the same index is
    forgotten first.
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
    """Take the state of a prepared block, a file as block_state.py has it, in the place of any state and slots it had.

    The state is copied: the extent may be released afterwards.
    """

    answer: ClassVar[type[Any]] = Loaded
    kind: Literal["load"] = "load"
    block: Count
    state: Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload(Command[Done]):
    """Forget a block: its graph, state and slots. Forgetting one that is not here is no error."""

    kind: Literal["unload"] = "unload"
    block: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Command[Forwarded]):
    """Run the blocks [begin, end) on one microbatch of `batch` samples; `draw` is what its random numbers depend on.

    It is of step `step`, and computed with the parameters of `version`, the newest one or an older one that is kept (`Apply.needed`). `inputs` are those of block `begin`, `outputs` those of block `end - 1` but for the loss, `data` what the blocks
    use of the author's inputs. With `train` the graph is kept under `task`, and on a CPU it refers to the extents of
    `inputs` and `data`: they must stay as they are until the task's `Backward` or `DropTask`.
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
    """Zeros of the inputs stand for what a codec left out upstream: no gradient goes back to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Command[Backpropagated]):
    """Backward through the kept graph of `task` of step `step`, which is forgotten, also when this fails.

    `weight` seeds the gradient of the loss (the microbatch's share of the step's samples) where the range ends in it.
    The parameters' gradients and the statistics of the blocks `fold` are added to their slot `slot`; either all of them
    are or, on failure, none. Slots are those of the step.
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
    """Forget the kept graph of `task` of step `step`, if there is one."""

    kind: Literal["drop_task"] = "drop_task"
    step: Count
    task: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSlot(Command[Done]):
    """Add slot `source` into `target` at `block` and forget `source`; without a `target` there, `source` becomes it."""

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
    """Forget every kept graph and every slot of step `step`: it is over, or was given up."""

    kind: Literal["clear_step"] = "clear_step"
    step: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpState(Command[Dumped]):
    """Write the state of `block` into `extent`, which has at least `Prepared.dump_bytes`."""

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
    """Compute a prepared block on made-up tensors and say how long it takes (rehearsal.py)."""

    answer: ClassVar[type[Any]] = Rehearsed
    kind: Literal["rehearse"] = "rehearse"
    block: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Info(Command[WorkerInfo]):
    """Say how the worker is."""

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
