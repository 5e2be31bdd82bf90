"""Memory of a block range in operation, found by running it on tensors with shapes but no memory.

The run is the real one (interpreter, autograd, recomputation) on fake CPU tensors, whose storages are counted
as they come and go. What a kernel allocates inside itself, as a convolution's workspace, is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetpeer.stages.block.block import Block, backpropagate, run_range
from hetpeer.stages.graph.block_spec import ITEM_BYTES, BlockSpec
from hetpeer.stages.graph.graph_cost import ANY_DRAW, empty
from hetpeer.stages.graph.parameter_reads import (
    cast_count,
    cast_parameters,
    looked_up_count,
    weight_bytes,
)
from hetpeer.stages.operators.names import EMBEDDING
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.pipeline.gradient_slots import LIVE
from hetpeer.stages.pipeline.place_memory import PlaceDemand, Upkeep

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes that one full microbatch takes at a holder, without what the blocks own."""

    kept: int
    """Between its forward and its backward: inputs, outputs, and what autograd keeps."""
    peak: int
    """The most at any time in forward and backward, with gradients of inputs, outputs and parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Most bytes that a holder of one stage needs, by purpose."""

    state: int
    """Parameters, running statistics, constants."""
    optimizer: int
    """The optimizer's state of the parameters, and a delayed averaging."""
    slots: int
    sums: int
    """In a reduce."""
    in_flight: int
    """Number of microbatches between forward and backward at most, including the one at work."""
    waiting: int
    """Kept by all microbatches in flight except the one at work."""
    working: int
    """Peak of the one at work, with its gradients."""
    demand: PlaceDemand
    """The same by what may lie apart (docs/memory.md)."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.state + self.optimizer + self.slots + self.sums + self.waiting + self.working


def stage_memory(
    blocks: Sequence[BlockSpec],
    hops_after: int,
    upkeep: Upkeep,
    microbatches: int | None = None,
    *,
    casts: bool = True,
) -> StageMemory:
    """Memory of consecutive blocks as one stage with `hops_after` stages behind it, at the depth of 1F1B.

    A step of few `microbatches` has at most so many in flight; None: it has many. `casts`: copies on a GPU
    are in bfloat16 where autocast casts them anyway.
    """
    found = footprint(blocks)
    numbers = sum(block.vector_count for block in blocks)
    vectors = ITEM_BYTES["float32"] * numbers
    constants = sum(spec.nbytes for block in blocks for spec in block.buffer_specs.values())
    in_flight = 2 * hops_after + 1  # as in schedule_1f1b.py
    in_flight = in_flight if microbatches is None else min(in_flight, microbatches)
    steps = 1 + upkeep.behind
    halved = sum(cast_count(block) for block in blocks) if casts else 0
    rows = sum(map(looked_up_count, blocks))
    named = ITEM_BYTES["float32"] * rows
    activations = _activations(found, in_flight, vectors - named)
    copies = 0
    if halved:
        gradient = sum(map(weight_bytes, blocks)) - named
        cast = _activations(footprint(blocks, cast=True), in_flight, gradient)
        copies = max(activations - cast, 0)
    return StageMemory(
        state=(steps + upkeep.means) * vectors + constants,
        optimizer=upkeep.kept * vectors,
        slots=steps * LIVE * vectors,
        sums=vectors,
        in_flight=in_flight,
        waiting=(in_flight - 1) * found.kept,
        working=found.peak,
        demand=PlaceDemand(
            numbers=numbers,
            constants=constants,
            activations=activations,
            copies=copies,
            halved=halved,
            looked_up=rows,
            upkeep=upkeep,
        ),
    )


def _activations(found: Footprint, in_flight: int, gradient: int) -> int:
    """Bytes of so many microbatches, without the gradient of the one at work."""
    return (in_flight - 1) * found.kept + max(found.peak - gradient, 0)


def footprint(specs: Sequence[BlockSpec], *, cast: bool = False) -> Footprint:
    """Run a full microbatch forward and backward through consecutive blocks. Raises ProtocolError.

    `cast`: parameters that autocast casts anyway are in bfloat16.
    """
    with FakeTensorMode(), torch.enable_grad():
        blocks, owned = [], []
        for spec in specs:
            parameters, buffers, statistics = (
                {name: empty(tensor, CPU) for name, tensor in kind.items()}
                for kind in (spec.parameter_specs, spec.buffer_specs, spec.statistic_specs)
            )
            names = cast_parameters(spec) if cast else frozenset[str]()
            for name in names:
                parameters[name] = empty(replace(spec.parameter_specs[name], dtype="bfloat16"), CPU)
            blocks.append(Block(_unpadded(spec), parameters, buffers, statistics, CPU, cast=names, rows=True))
            owned += [*parameters.values(), *buffers.values(), *statistics.values()]
        with LiveBytes(owned) as live:
            inputs, outputs = _forward(blocks, live)
            kept = live.now
            leaves = [*inputs.values(), *(tensor for tensor in owned if tensor.requires_grad)]
            _backward([tensor for tensor in leaves if tensor.requires_grad], outputs, live)
            return Footprint(kept=kept, peak=live.peak)


def _unpadded(spec: BlockSpec) -> BlockSpec:
    """The block with lookups that name no padding: how many of its ids are padding is not known here."""
    return replace(
        spec,
        nodes=tuple(
            replace(node, args=(*node.args[:2], -1, *node.args[3:])) if node.op == EMBEDDING else node
            for node in spec.nodes
        ),
    )


def _forward(blocks: Sequence[Block], live: LiveBytes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(inputs, outputs); the author's data stays only where autograd keeps it."""
    full = [block.spec.at(block.spec.batch) for block in blocks]
    inputs = {name: empty(spec, CPU) for name, spec in full[0].inputs.items()}
    data = {name: empty(tensor, CPU) for spec in full for name, tensor in spec.data.items()}
    live.add((*inputs.values(), *data.values()))
    return inputs, run_range(blocks, inputs, data, full[0].batch, Pass(ANY_DRAW))


def _backward(leaves: Sequence[Tensor], outputs: Mapping[str, Tensor], live: LiveBytes) -> None:
    """Run the backward as the worker does: all gradients exist at the end."""
    roots = [tensor for tensor in outputs.values() if tensor.requires_grad]
    seeds = [torch.empty_like(tensor) for tensor in roots]
    live.add(seeds)
    if leaves and roots:
        backpropagate(roots, leaves, seeds)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """While active, counts the bytes of all storages that operators make and that are still referenced.

    Storages of the tensors `apart`, and views of them, do not count.
    """

    def __init__(self, apart: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in apart:
            self._count(tensor, 0)

    def add(self, tensors: Iterable[Any]) -> None:
        """Count tensors that no operator made while this was active."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not tensor.is_sparse:  # a sparse one is made of two that count
                self._count(tensor, tensor.untyped_storage().nbytes())

    def _count(self, tensor: Tensor, nbytes: int) -> None:
        """Add a storage to the live bytes until it is freed; each is counted once."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return

        def gone(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._known[key]
            self.now -= nbytes

        self._known[key] = weakref.ref(storage, gone)
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(tree_leaves(result))
        return result
