"""The model as plain data without torch: tensors, operator calls and blocks.

A block is the smallest piece into which a model's operator graph may be cut. Everything here is frozen and
compares by value, so a block can be hashed, packed (block_wire.py), planned with (planning/) and run
(block/block.py) by peers that never saw the author's Python. Values are named; a name means the same value in
every block of one model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from hetpeer.dht.base.errors import ProtocolError

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
"""Bytes of one element, by dtype name: the dtypes that a graph may use."""
SAFETENSORS: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
"""Dtype name → that of safetensors."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A size that is `multiple` times the number of samples in the microbatch (docs/graph.md)."""

    multiple: int


Size = int | Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of a tensor before it exists. `grad`: a gradient flows back through it."""

    shape: tuple[Size, ...]
    dtype: str
    grad: bool = False

    def at(self, batch: int) -> TensorSpec:
        """The spec for a microbatch of `batch` samples: all sizes are numbers."""
        if not any(isinstance(size, Batch) for size in self.shape):
            return self
        return replace(self, shape=tuple(_number(size, batch) for size in self.shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape in numbers. Raises ValueError if it depends on the batch."""
        return tuple(map(_fixed, self.shape))

    @property
    def count(self) -> int:
        """Number of elements. Raises ValueError if it depends on the batch."""
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes when stored contiguously. Raises ValueError if it depends on the batch."""
        return self.count * ITEM_BYTES[self.dtype]


Value = TensorSpec | tuple[TensorSpec, ...]
"""Spec of a value of the graph: a tensor, or the several results of one operator."""


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is another value of the graph."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that names one of torch's constants: kind `dtype`, `memory_format` or `text`."""

    kind: str
    value: str


Argument = None | bool | int | float | Batch | Ref | Symbol | tuple["Argument", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCall:
    """One operator call: `name = op(*args, **kwargs)`; `op` is a key of the table in operators.py."""

    name: str
    op: str
    args: tuple[Argument, ...] = ()
    kwargs: Mapping[str, Argument]

    def references(self) -> Iterator[str]:
        """Names of the values that this call reads, in order, with repetitions."""
        yield from references((*self.args, *self.kwargs.values()))

    def at(self, batch: int) -> OperatorCall:
        """The same call for a microbatch of `batch` samples."""
        kwargs = {key: _argument_at(argument, batch) for key, argument in self.kwargs.items()}
        return replace(self, args=tuple(_argument_at(a, batch) for a in self.args), kwargs=kwargs)


def _number(size: Size, batch: int) -> int:
    return size.multiple * batch if isinstance(size, Batch) else size


def _fixed(size: Size) -> int:
    if isinstance(size, Batch):
        raise ValueError("the size depends on the batch")  # noqa: TRY004 (the type is right, the moment is not)
    return size


def _argument_at(argument: Argument, batch: int) -> Argument:
    if isinstance(argument, Batch):
        return argument.multiple * batch
    if isinstance(argument, tuple):
        return tuple(_argument_at(item, batch) for item in argument)
    return argument


def _specs_at(specs: Mapping[str, TensorSpec], batch: int) -> dict[str, TensorSpec]:
    return {name: spec.at(batch) for name, spec in specs.items()}


def references(argument: Argument) -> Iterator[str]:
    """Names inside one argument, in order."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """One block: its inputs and outputs, the tensors it owns, and its operator calls.

    The order of `inputs`, `outputs`, `data` and `parameter_specs` is part of the block. The outputs of block
    i are the inputs of block i + 1, name by name; a value that only passes through is in both.
    """

    index: int
    inputs: Mapping[str, TensorSpec]
    """The bundle that enters at this block's border; empty for the first block."""
    outputs: Mapping[str, TensorSpec]
    """The bundle that leaves; for the last block only the scalar loss."""
    data: Mapping[str, TensorSpec]
    """The author's inputs used here (tokens, targets): they come from the data, never over a border."""
    nodes: tuple[OperatorCall, ...]
    """Operator calls in an executable order."""
    parameters: Mapping[str, str]
    """Value name → the parameter's name in the author's model."""
    parameter_specs: Mapping[str, TensorSpec]
    """Parameter name → spec. This order is the layout of the block's flat float32 vector."""
    buffers: Mapping[str, str]
    """Value name → buffer name; frozen parameters are buffers. Several blocks may use the same buffer."""
    buffer_specs: Mapping[str, TensorSpec]
    statistics: Mapping[str, str] = field(default_factory=dict)
    """Value name → buffer name of BatchNorm's running values, which training changes (docs/graph.md)."""
    statistic_specs: Mapping[str, TensorSpec] = field(default_factory=dict)
    """Buffer name → spec, float32. They follow the parameters in the block's vector, in this order."""
    batch: int
    """Samples of a full microbatch, to which the next two costs refer."""
    flops_forward: int
    """Floating-point operations of one microbatch's forward; a backward counts as twice that."""
    activation_bytes: int
    """Bytes that stay in memory from the forward to the backward of one microbatch, without parameters."""
    loss: str | None
    """Name of the output that is the loss, in the last block."""
    autocast: bool = False
    """Whether the block computes under bf16 autocast: float32 tensors cross its borders as bfloat16."""
    recompute: bool = False
    """Whether the forward runs again before the backward instead of keeping activations for autograd, at
    every holder. Without it each holder chooses (pipeline/recomputed_blocks.py).
    """

    def at(self, batch: int) -> BlockSpec:
        """The block for a microbatch of `batch` samples: every size in it is a number."""
        return replace(
            self,
            inputs=_specs_at(self.inputs, batch),
            outputs=_specs_at(self.outputs, batch),
            data=_specs_at(self.data, batch),
            nodes=tuple(node.at(batch) for node in self.nodes),
        )

    def recomputing(self) -> BlockSpec:
        """The block as somebody with little memory holds it: with `recompute`, and the same bits."""
        full = self.at(self.batch)
        stays = (*full.inputs.values(), *full.statistic_specs.values(), *full.data.values())
        return replace(self, recompute=True, activation_bytes=sum(tensor.nbytes for tensor in stays))

    @property
    def owned(self) -> dict[str, TensorSpec]:
        """Value name → spec of everything that is not in the microbatch: parameters, buffers, statistics."""
        return {
            name: specs[fqn]
            for names, specs in (
                (self.parameters, self.parameter_specs),
                (self.buffers, self.buffer_specs),
                (self.statistics, self.statistic_specs),
            )
            for name, fqn in names.items()
        }

    @property
    def entering(self) -> dict[str, TensorSpec]:
        """`inputs` as the operators get them: values that autocast carries as bfloat16 are float32 again."""
        if not self.autocast:
            return dict(self.inputs)
        return {
            name: replace(spec, dtype="float32") if spec.dtype == "bfloat16" else spec
            for name, spec in self.inputs.items()
        }

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters."""
        return sum(spec.count for spec in self.parameter_specs.values())

    @property
    def vector_count(self) -> int:
        """Elements of the block's gradient vector: parameters, then statistics."""
        return self.parameter_count + sum(spec.count for spec in self.statistic_specs.values())

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(spec.nbytes for spec in self.parameter_specs.values())


def times_forward(recompute: bool) -> int:
    """FLOPs of a microbatch's forward and backward, as a multiple of its forward's."""
    return 4 if recompute else 3


_ARGUMENTS = 7


def running_values(node: OperatorCall) -> tuple[Ref, Ref]:
    """The running mean and variance that a batch_norm call reads. Raises ProtocolError if it names none."""
    mean, variance = node.args[3:5] if len(node.args) == _ARGUMENTS else (None, None)
    if not isinstance(mean, Ref) or not isinstance(variance, Ref):
        raise ProtocolError(f"{node.name!r} has no running mean and variance")
    return mean, variance


def momentum(node: OperatorCall) -> float:
    """Weight of a new statistic in a batch_norm call. Raises ProtocolError unless it is in [0, 1]."""
    value = node.args[5] if len(node.args) == _ARGUMENTS else None
    if type(value) is not float or not 0 <= value <= 1:
        raise ProtocolError(f"{node.name!r} has the momentum {value!r}")
    return value
