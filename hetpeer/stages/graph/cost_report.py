"""Costs of blocks, operator by operator: the table that `hetpeer inspect` shows and a planner reads.

FLOPs and bytes are of one full microbatch. Nothing is measured in seconds here: block/device.py turns
FLOPs into a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hetpeer.stages.graph.block_spec import BlockSpec, OperatorCall, TensorSpec, Value
from hetpeer.stages.graph.graph_cost import call_flops, kept_bytes, measure


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """Costs of one operator call of a block."""

    name: str
    op: str
    result: Value
    """Its result, of fixed sizes; `grad`: it requires one."""
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
    """Values of the block that it reads (made, entering or data) → bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCostRow:
    """Costs of one block: a row of the table."""

    index: int
    operators: tuple[OperatorCost, ...]
    parameters: int
    parameter_bytes: int
    flops_forward: int
    flops_backward: int
    """With recomputation it includes the second forward."""
    activation_bytes: int
    """Bytes kept from forward to backward; as `BlockSpec.activation_bytes`."""
    enters: Mapping[str, int]
    leaves: Mapping[str, int]
    """Values that cross the block's borders → bytes."""
    data: tuple[str, ...]
    """The author's inputs that it reads."""


def block_cost(spec: BlockSpec) -> BlockCostRow:
    """The costs of a block and of each operator, in order. Raises ProtocolError if one cannot be run."""
    full = spec.at(spec.batch)
    given = {**full.entering, **full.data, **full.owned}
    values = {**given, **measure(full.nodes, given).values}
    reached = _reached(full, values)
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


def _reached(spec: BlockSpec, values: Mapping[str, Value]) -> set[str]:
    """Values to which a gradient comes back, from the outputs that get one."""
    reached = {name for name, tensor in spec.outputs.items() if tensor.grad}
    for node in reversed(spec.nodes):
        if node.name in reached:
            reached.update(name for name in node.references() if _requires_grad(values[name]))
    return reached


def _requires_grad(value: Value) -> bool:
    return value.grad if isinstance(value, TensorSpec) else any(part.grad for part in value)
