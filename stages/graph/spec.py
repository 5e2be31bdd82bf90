"""The model as plain data: tensors, operator calls and blocks, with no torch in sight.

A block is the smallest piece into which a model's operator graph may be cut. Everything here is frozen and compares
by value, so a block can be hashed, packed (wire.py), planned with (cut.py) and run (execution/block.py) by peers that
never saw the author's Python. Values are named; a name means the same value in every block of one model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
"""Bytes of one element, by dtype name: the dtypes a graph may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What is known of a tensor before it exists. `grad`: a gradient flows back through it."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool = False

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes when stored contiguously."""
        return self.count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is another value of the graph."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that names one of torch's constants: kind `dtype`, `memory_format` or `text`."""

    kind: str
    value: str


Argument = None | bool | int | float | Ref | Symbol | tuple["Argument", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator call: `name = op(*args, **kwargs)`; `op` is a key of the table in ops.py."""

    name: str
    op: str
    args: tuple[Argument, ...] = ()
    kwargs: Mapping[str, Argument]

    def references(self) -> Iterator[str]:
        """Names of the values this call reads, repeated as often as they are read."""
        yield from references((*self.args, *self.kwargs.values()))


def references(argument: Argument) -> Iterator[str]:
    """Names inside one argument, in order."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """One block: what enters, what leaves, what it owns, and the operator calls between.

    The order of `inputs`, `outputs`, `data` and `parameter_specs` is part of the block. The outputs of block i are
    the inputs of block i + 1, name by name; a value that only passes through is in both.
    """

    index: int
    inputs: Mapping[str, TensorSpec]
    """The bundle that enters at this block's border; empty for the first block."""
    outputs: Mapping[str, TensorSpec]
    """The bundle that leaves; for the last block the scalar loss alone."""
    data: Mapping[str, TensorSpec]
    """The author's inputs used here (tokens, targets): they come from the data, never over a border."""
    nodes: tuple[Node, ...]
    """Operator calls in an order that may be executed as it stands."""
    parameters: Mapping[str, str]
    """Value name -> the parameter's name in the author's model."""
    parameter_specs: Mapping[str, TensorSpec]
    """Parameter name -> spec. This order is the layout of the block's flat float32 vector."""
    buffers: Mapping[str, str]
    """Value name -> buffer name; frozen parameters are buffers. Several blocks may use the same buffer."""
    buffer_specs: Mapping[str, TensorSpec]
    flops_forward: int
    """Floating-point operations of one forward pass of one microbatch; a backward pass counts twice that."""
    activation_bytes: int
    """Bytes that stay in memory from the forward to the backward pass of one microbatch, without parameters."""
    loss: str | None
    """Name of the output that is the loss, in the last block."""

    @property
    def parameter_count(self) -> int:
        return sum(spec.count for spec in self.parameter_specs.values())

    @property
    def parameter_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.parameter_specs.values())
