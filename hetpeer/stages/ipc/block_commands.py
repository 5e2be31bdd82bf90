"""Commands to the compute worker: blocks, microbatches, gradient slots, bundles and the worker itself.

Plain frozen values; worker_messages.py puts them on a socket and has their answers. Tensors never cross it:
an `Extent` names their place in the arena. Commands of one lane are carried out and answered in the order of
posting; lanes work at the same time. Bundles sent and received have lanes of their own, beside computing. A
command that failed is answered by `CommandFailed` and has changed nothing; the worker lives on.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field

from hetpeer.stages.block.fingerprint import KEY_BYTES
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.worker_messages import (
    Backpropagated,
    BlockPrepared,
    BundleMarked,
    Command,
    Count,
    Done,
    Dumped,
    Encoded,
    Forwarded,
    Loaded,
    Name,
    Number,
    Rehearsed,
    Setting,
    WarmedUp,
    WorkerInfo,
    WorkerLane,
)
from hetpeer.stages.links.codec import EncodedTensor
from hetpeer.stages.operators.random_draws import Draw

Extents = dict[Name, Extent]
"""Tensor name → its bytes: contiguous, row-major, little-endian, dtype and shape as the block's spec says."""


class PrepareBlock(Command[BlockPrepared], kind="prepare"):
    """Check and keep a block's packed graph (graph/block_wire.py), its buffers' raw bytes and its update
    rule.

    `update`: the rule's settings in the manifest; `groups`: differences for some parameters
    (parameter_groups.py); `keeps`: names of what the rules keep for each parameter; `outer`: settings of the
    outer optimizer; `offload`: where its vectors will lie; `spills`: whether the scratch file may have any of
    them; `cast`: with offload, keep weights in bfloat16 on the device where autocast casts them anyway, which
    excludes `Apply.compensation`. The buffers are copied. A block with the same index is forgotten first.
    """

    block: Count
    graph: bytes
    buffers: Extents = field(default_factory=dict)
    update: dict[Name, Setting]
    groups: tuple[tuple[Name, dict[Name, Setting]], ...] = ()
    keeps: tuple[Name, ...]
    outer: dict[Name, Setting] | None = None
    ranges: tuple[tuple[Count, Count], ...] = ()
    offload: Offload = Offload.NONE
    spills: bool = True
    cast: bool = False


class LimitScratch(Command[Done], kind="limit_scratch"):
    """Use at most `nbytes` of the scratch file from now on; nothing may lie in it yet."""

    nbytes: Count


class LoadState(Command[Loaded], kind="load"):
    """Load the state of a prepared block, a file as in state_file.py, in place of any state and slots it
    had.

    `state` is a place in the exchange file, which may be given back afterwards. `recompute`: its forwards run
    again before their backwards, which saves memory and changes no bit (pipeline/recomputed_blocks.py).
    """

    block: Count
    state: Extent
    recompute: bool = False


class Unload(Command[Done], kind="unload"):
    """Forget a block: its graph, state and slots. An absent block is no error."""

    block: Count


class Forward(Command[Forwarded], kind="forward"):
    """Run the blocks [begin, end) on one microbatch of `batch` samples; `draw` seeds its random numbers.

    It belongs to `step`. `versions`: of each block's parameters, the newest or an older one still kept
    (`Apply.needed`). `inputs` are those of block `begin`, `outputs` those of block `end - 1` except the loss,
    `data` the author's inputs that the blocks use. With `train` the graph is kept under `task`; on a CPU it
    refers to the extents of `inputs` and `data`, which must not change until the task's `Backward` or
    `DropTask`.
    """

    step: Count
    versions: tuple[Count, ...]
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
    """Zeros of the inputs stand for elements that a codec left out: no gradient goes back to them."""


class Backward(Command[Backpropagated], kind="backward"):
    """Backward through the kept graph of `task` in `step`; the graph is forgotten, also on failure.

    `weight` seeds the gradient of the loss (the microbatch's share of the step's samples) if the range ends
    in it. The parameters' gradients and the statistics of the blocks `fold` are added to their slot `slot` of
    the step: all of them, or none on failure. With `weigh` all is computed once more, to measure rounding.
    """

    step: Count
    task: Name
    output_gradients: Extents = field(default_factory=dict)
    input_gradients: Extents = field(default_factory=dict)
    weight: Number = 1.0
    slot: Count
    fold: tuple[Count, ...]
    weigh: bool = False


class DropTask(Command[Done], kind="drop_task"):
    """Forget the kept graph of `task` in `step`, if there is one."""

    step: Count
    task: Name


class MergeSlot(Command[Done], kind="merge_slot"):
    """Add slot `source` to `target` at `block` and forget it; without a `target`, `source` becomes it."""

    step: Count
    block: Count
    source: Count
    target: Count


class DropSlot(Command[Done], kind="drop_slot"):
    """Forget slot `slot` at `block`, if there is one."""

    step: Count
    block: Count
    slot: Count


class ClearStep(Command[Done], kind="clear_step"):
    """Forget every kept graph and every slot of `step`, which is over or was given up."""

    step: Count


class DumpState(Command[Dumped], kind="dump_state"):
    """Write the state of `block` to `extent` of the exchange file, of at least `BlockPrepared.dump_bytes`."""

    block: Count
    extent: Extent


class WarmUp(Command[WarmedUp], kind="warm_up"):
    """Measure the device for at most about a second."""


class Rehearse(Command[Rehearsed], kind="rehearse"):
    """Run a prepared block on made-up tensors and time it (worker/rehearsal.py)."""

    block: Count


class Info(Command[WorkerInfo], kind="info"):
    """Report the worker's condition."""


class Shutdown(Command[Done], kind="shutdown"):
    """Answer, then end the process."""


class Encode(Command[Encoded], kind="encode", lane=WorkerLane.SEND):
    """Encode a bundle's tensors (dtype and extent of each) into `into` with `codec` (bundle_codec.py).

    The tensors do not change. `into` has at least `BundleLayout.room` bytes.
    """

    codec: Name
    share: Number = 1.0
    squeeze: bool = True
    feedback: Name = ""
    tensors: tuple[tuple[Name, Extent], ...]
    into: Extent


class Decode(Command[Done], kind="decode", lane=WorkerLane.RECEIVE):
    """Fill a bundle's tensors from `data`, which a peer encoded with `codec` and answers for."""

    codec: Name
    written: tuple[EncodedTensor, ...]
    data: Extent
    tensors: tuple[tuple[Name, Extent], ...]


class MarkBundle(Command[BundleMarked], kind="mark_bundle", lane=WorkerLane.RECEIVE):
    """Fingerprint a bundle's tensors (dtype and extent of each) under `key` (fingerprint.py)."""

    tensors: tuple[tuple[Name, Extent], ...]
    key: Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class ForgetResiduals(Command[Done], kind="forget_residuals", lane=WorkerLane.SEND):
    """Drop the residuals of error feedback, since the place changes."""
