"""What a graph costs, found by running it on tensors that have shapes but no memory.

FLOPs come from torch's own formulas (FlopCounterMode) on meta tensors, where attention is the plain product of
matrices; an operator without a formula counts one operation per element it makes, so that nothing but a rearrangement
is free. Memory kept for backward is asked of autograd itself, on fake CPU tensors, where attention is the fused kernel
that a peer will run. Nothing here is measured time: that is the planner's business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from hetpeer.dht.errors import ProtocolError
from hetpeer.stages.graph.ops import MOVES, SYMBOLS
from hetpeer.stages.graph.program import Program
from hetpeer.stages.graph.spec import ITEM_BYTES, Node, TensorSpec

Value = TensorSpec | tuple[TensorSpec, ...]
"""A value of the graph: a tensor, or the several results of one operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What each call makes and costs, by value name."""

    values: Mapping[str, Value]
    flops: Mapping[str, int]


def measure(
    nodes: Sequence[Node],
    given: Mapping[str, TensorSpec],
    check: Callable[[Node, Value, int], None] | None = None,
) -> Measured:
    """Run the calls on meta tensors; `given` are the values they start from.

    `check(node, value, flops)` may raise to stop early. Raises ProtocolError when an operator refuses its arguments.
    """
    values: dict[str, Value] = {}
    flops: dict[str, int] = {}
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        counted = 0

        def observe(node: Node, result: Any) -> None:
            nonlocal counted
            total = counter.get_total_flops()
            value = _describe(result)
            values[node.name] = value
            flops[node.name] = (total - counted) or (0 if node.op in MOVES else _count(value))
            counted = total
            if check is not None:
                check(node, value, flops[node.name])

        meta = torch.device("meta")
        Program(nodes, (), meta).run({name: _empty(spec, meta) for name, spec in given.items()}, observe)
    return Measured(values=values, flops=flops)


def activation_bytes(
    nodes: Sequence[Node],
    inputs: Mapping[str, TensorSpec],
    owned: Mapping[str, TensorSpec],
    outputs: Collection[str],
) -> int:
    """Bytes autograd keeps from forward to backward, plus the inputs; parameters and buffers (`owned`) not counted."""
    cpu = torch.device("cpu")
    kept: dict[
        int, torch.UntypedStorage
    ] = {}  # storages stay referenced here, so an id is never given out again

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[id(storage)] = storage
        return tensor

    with FakeTensorMode(), torch.enable_grad():
        values = {name: _empty(spec, cpu) for name, spec in {**owned, **inputs}.items()}
        for name in owned:
            keep(values[name])
        before = sum(storage.nbytes() for storage in kept.values())
        for name in inputs:
            keep(values[name])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            Program(nodes, outputs, cpu).run(values)
    return sum(storage.nbytes() for storage in kept.values()) - before


def _empty(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    dtype = SYMBOLS["dtype"][spec.dtype]
    return torch.empty(spec.shape, dtype=dtype, device=device, requires_grad=spec.grad)


def _describe(result: Any) -> Value:
    if isinstance(result, (tuple, list)):
        return tuple(_describe_tensor(part) for part in result)
    return _describe_tensor(result)


def _describe_tensor(result: Any) -> TensorSpec:
    if not isinstance(result, torch.Tensor):
        raise ProtocolError(f"an operator of the graph made a {type(result).__name__}, not a tensor")
    dtype = str(result.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise ProtocolError(f"an operator of the graph made a tensor of {dtype}")
    return TensorSpec(shape=tuple(result.shape), dtype=dtype, grad=result.requires_grad)


def _count(value: Value) -> int:
    """Elements in a value."""
    return value.count if isinstance(value, TensorSpec) else sum(part.count for part in value)
