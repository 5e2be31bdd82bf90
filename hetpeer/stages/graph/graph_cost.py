"""Costs of a graph, found by running it on tensors with shapes but no memory, and a table by operator.

FLOPs come from torch's own formulas (FlopCounterMode) on meta tensors, where attention is the plain product
of matrices. An operator without a formula counts one operation for each element that it makes, or what
`Operator.work` says, so that only rearrangements are free. Memory kept for the backward comes from autograd
itself, on fake CPU tensors, where attention is the fused kernel that a peer will run.

The table is what `hetpeer inspect` shows and a planner reads: FLOPs and bytes of one full microbatch. Nothing
is measured in seconds here: block/device.py turns FLOPs into a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import (
    ITEM_BYTES,
    Argument,
    BlockSpec,
    OperatorCall,
    Ref,
    TensorSpec,
    Value,
)
from hetpeer.stages.graph.interpreter import SYMBOLS, Program
from hetpeer.stages.operators.frozen_operators import FAMILY as FROZEN
from hetpeer.stages.operators.operators import operator_of
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.operators.random_draws import Draw

ANY_DRAW = Draw(seed=0, step=0, microbatch=0, microbatches=1)
"""Tensors without memory have no values, so any mask will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Result and FLOPs of each call, by value name."""

    values: Mapping[str, Value]
    flops: Mapping[str, int]


def measure(
    nodes: Sequence[OperatorCall],
    given: Mapping[str, TensorSpec],
    check: Callable[[OperatorCall, Value, int], None] | None = None,
) -> Measured:
    """Run the forward of a training pass on meta tensors, from the values `given`, all of fixed sizes.

    `check(node, value, flops)` may raise to stop early. Raises ProtocolError if an operator refuses its
    arguments.
    """
    values: dict[str, Value] = {}
    flops: dict[str, int] = {}
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        counted = 0

        def observe(node: OperatorCall, result: Any) -> None:
            nonlocal counted
            total = counter.get_total_flops()
            value = _describe(result)
            values[node.name] = value
            flops[node.name] = (total - counted) or _elementwise(node.op, value)
            counted = total
            if check is not None:
                check(node, value, flops[node.name])

        meta = torch.device("meta")
        start = {name: empty(spec, meta) for name, spec in given.items()}
        Program(nodes, (), meta).run(start, Pass(ANY_DRAW), observe)
    return Measured(values=values, flops=flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFlops:
    """Floating-point operations of one call for a full microbatch."""

    forward: int
    backward: int
    """FLOPs of the gradients of those arguments that get one, given that of the result."""
    formula: bool
    """Whether torch has a formula (products, convolutions, attention); else one FLOP an element made."""


def call_flops(node: OperatorCall, values: Mapping[str, Value]) -> CallFlops:
    """FLOPs of one call alone; `values` has the specs of all values that it reads, of fixed sizes.

    Autograd itself runs the backward, so a product counts once for each factor that gets a gradient. Calls of
    one kind are measured once. Raises ProtocolError if the operator refuses its arguments, forward or
    backward.
    """
    names = {name: str(position) for position, name in enumerate(dict.fromkeys(node.references()))}
    args = tuple(_renamed(argument, names) for argument in node.args)
    kwargs = tuple((key, _renamed(argument, names)) for key, argument in sorted(node.kwargs.items()))
    return _call_flops(node.op, args, kwargs, tuple(values[name] for name in names))


@lru_cache(4096)
def _call_flops(
    op: str, args: tuple[Argument, ...], kwargs: tuple[tuple[str, Argument], ...], reads: tuple[Value, ...]
) -> CallFlops:
    """FLOPs of one call, forward and backward: torch's formula, else one per element. Runs on `meta`."""
    meta = torch.device("meta")
    start = {str(position): _empty_value(value, meta) for position, value in enumerate(reads)}
    leaves = [tensor for tensor in tree_leaves(list(start.values())) if tensor.requires_grad]
    node = OperatorCall(name="result", op=op, args=args, kwargs=dict(kwargs))
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        result = Program([node], ("result",), meta).run(start, Pass(ANY_DRAW))["result"]
        formula = counter.get_total_flops()
        roots = [tensor for tensor in tree_leaves(result) if tensor.requires_grad]
        try:
            found = torch.autograd.grad(roots, leaves, roots, allow_unused=True) if roots else ()
        except Exception as error:  # hostile arguments may make a kernel raise anything
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ProtocolError(f"{op} has no backward pass", why=line) from error
        formula_backward = counter.get_total_flops() - formula
    operator = operator_of(op)
    if operator.moves:
        return CallFlops(forward=formula, backward=formula_backward, formula=False)
    made = operator.work * sum(gradient.numel() for gradient in found if gradient is not None)
    return CallFlops(
        forward=formula or _elementwise(op, _describe(result)),
        backward=formula_backward or made,
        formula=formula > 0,
    )


def activation_bytes(spec: BlockSpec) -> int:
    """Bytes of a full microbatch kept from forward to backward: inputs, BatchNorm's statistics, autograd's
    tensors.

    Tensors that the block owns do not count. With recomputation autograd keeps only the author's data.
    """
    if spec.recompute:
        return spec.recomputing().activation_bytes
    full = spec.at(spec.batch)
    stays = sum(tensor.nbytes for tensor in (*full.inputs.values(), *full.statistic_specs.values()))
    return stays + sum(kept_bytes(spec).values())


def kept_bytes(spec: BlockSpec) -> dict[str, int]:
    """Call → bytes that it makes autograd keep of a full microbatch, beyond the inputs and earlier calls.

    For a block with recomputation, in the pass before the backward.
    """
    full, cpu = spec.at(spec.batch), torch.device("cpu")
    kept: dict[int, torch.UntypedStorage] = {}  # referenced, so that an id is never reused
    fresh = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal fresh
        storage = tensor.untyped_storage()
        if id(storage) not in kept:
            kept[id(storage)] = storage
            fresh += storage.nbytes()
        return tensor

    by_call: dict[str, int] = {}

    def observe(node: OperatorCall, result: Any) -> None:
        nonlocal fresh
        by_call[node.name], fresh = fresh, 0
        if node.op in FROZEN:  # a block makes it again (block/remade_values.py)
            keep(result)
            fresh = 0

    with FakeTensorMode(), torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=spec.autocast):
        values = {name: empty(tensor, cpu) for name, tensor in {**full.owned, **full.inputs}.items()}
        for tensor in values.values():
            keep(tensor)
        values |= {name: empty(tensor, cpu) for name, tensor in full.data.items()}
        for name, entering in full.entering.items():
            values[name] = values[name].to(SYMBOLS["dtype"][entering.dtype])
        fresh = 0
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            Program(full.nodes, full.outputs, cpu).run(values, Pass(ANY_DRAW), observe)
    return by_call


def empty(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """An uninitialized leaf tensor with the spec, of fixed sizes."""
    dtype = SYMBOLS["dtype"][spec.dtype]
    return torch.empty(spec.sizes, dtype=dtype, device=device, requires_grad=spec.grad)


def _empty_value(value: Value, device: torch.device) -> Any:
    return empty(value, device) if isinstance(value, TensorSpec) else [empty(part, device) for part in value]


def _renamed(argument: Argument, names: Mapping[str, str]) -> Argument:
    """The argument with other names of values."""
    if isinstance(argument, Ref):
        return Ref(names[argument.name])
    return tuple(_renamed(item, names) for item in argument) if isinstance(argument, tuple) else argument


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


def _elementwise(op: str, value: Value) -> int:
    """FLOPs of a call without a formula that makes `value`."""
    operator = operator_of(op)
    return 0 if operator.moves else operator.work * _count(value)


def _count(value: Value) -> int:
    """Number of elements in a value."""
    return value.count if isinstance(value, TensorSpec) else sum(part.count for part in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """Costs of one operator call of a block."""

    name: str
    op: str
    result: Value
    """Result of the call, of fixed sizes; its `grad`: whether it requires a gradient."""
    formula: bool
    """Whether torch has a formula for its FLOPs; else each element of the result counts as one."""
    flops_forward: int
    flops_backward: int
    """FLOPs of its backward: 0 if no gradient arrives, and only for arguments that get one."""
    parameter_bytes: int
    """Bytes of the parameters that it is the first of the block to read."""
    kept_bytes: int
    """Bytes that it makes autograd keep, beyond the inputs and what earlier operators made it keep."""
    reads: Mapping[str, int]
    """Values of the block that the call reads (made, entering or data) → bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCostRow:
    """Costs of one block: a row of the table."""

    index: int
    operators: tuple[OperatorCost, ...]
    parameters: int
    parameter_bytes: int
    flops_forward: int
    flops_backward: int
    """FLOPs of the backward; with recomputation, of the second forward as well."""
    activation_bytes: int
    """Bytes kept from forward to backward; as `BlockSpec.activation_bytes`."""
    enters: Mapping[str, int]
    leaves: Mapping[str, int]
    """Values that cross the block's borders → bytes."""
    data: tuple[str, ...]
    """The author's inputs that the block reads."""


def block_cost(spec: BlockSpec) -> BlockCostRow:
    """The costs of a block and of each operator, in order. Raises ProtocolError if one cannot be run."""
    full = spec.at(spec.batch)
    given = {**full.entering, **full.data, **full.owned}
    values = {**given, **measure(full.nodes, given).values}
    ends = [name for name, tensor in full.outputs.items() if tensor.grad]
    reached = gradient_reach(full.nodes, values, ends)
    kept = kept_bytes(spec)
    unread = set(full.parameters)
    operators = []
    for node in full.nodes:
        flops = call_flops(node, values)
        first_read = unread.intersection(node.references())
        unread -= first_read
        operators.append(
            OperatorCost(
                name=node.name,
                op=node.op,
                result=values[node.name],
                formula=flops.formula,
                flops_forward=flops.forward,
                flops_backward=flops.backward if node.name in reached else 0,
                parameter_bytes=sum(value_bytes(values[name]) for name in first_read),
                kept_bytes=kept[node.name],
                reads=_edges(node, values, full.owned),
            )
        )
    forward = sum(operator.flops_forward for operator in operators)
    backward = sum(operator.flops_backward for operator in operators)
    return BlockCostRow(
        index=spec.index,
        operators=tuple(operators),
        parameters=spec.parameter_count,
        parameter_bytes=spec.parameter_bytes,
        flops_forward=forward,
        flops_backward=backward + (forward if spec.recompute else 0),
        activation_bytes=spec.activation_bytes,
        enters={name: tensor.nbytes for name, tensor in full.inputs.items()},
        leaves={name: tensor.nbytes for name, tensor in full.outputs.items()},
        data=tuple(full.data),
    )


def tied_parameters(specs: Sequence[BlockSpec]) -> dict[str, list[int]]:
    """Parameters that several blocks use: name → the blocks, in order."""
    users: dict[str, list[int]] = {}
    for spec in specs:
        for name in spec.parameter_specs:
            users.setdefault(name, []).append(spec.index)
    return {name: blocks for name, blocks in users.items() if len(blocks) > 1}


def value_bytes(value: Value) -> int:
    """Bytes of a value of fixed sizes."""
    return sum(part.nbytes for part in ((value,) if isinstance(value, TensorSpec) else value))


def _edges(node: OperatorCall, values: Mapping[str, Value], owned: Collection[str]) -> dict[str, int]:
    """Values that a call reads → bytes; of several results a getitem reads the one that it returns."""
    read = {name: values[name] for name in node.references() if name not in owned}
    return {
        name: value_bytes(value if isinstance(value, TensorSpec) else values[node.name])
        for name, value in read.items()
    }


def gradient_reach(
    nodes: Sequence[OperatorCall], values: Mapping[str, Value], ends: Iterable[str]
) -> set[str]:
    """Values to which `ends` send a gradient: backwards along everything that requires one."""
    found = set(ends)
    for node in reversed(nodes):
        if node.name in found:
            found.update(name for name in node.references() if _requires_grad(values[name]))
    return found


def _requires_grad(value: Value) -> bool:
    return value.grad if isinstance(value, TensorSpec) else any(part.grad for part in value)
