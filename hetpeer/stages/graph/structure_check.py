"""The consistency check of a block from a stranger, and of its declarations against limits. Without torch.

Peers that only pass a block on use it. Every value is made once and before it is read, and every tensor has
one owner. The peer that runs the block also uses safety_check.py: whether it can be computed, and whether it
makes what it declares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import Batch, BlockSpec, TensorSpec, running_values
from hetpeer.stages.operators.names import BATCH_NORM

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLimits:
    """Limits on one block; a block beyond any of them is refused."""

    packed_bytes: int = MIB
    """Bytes of the packed block; a transformer layer takes about 2 KiB."""
    items: int = 20_000
    """Entries of one list or map, hence also operator calls of one block; and tensors that they make."""
    name_length: int = 512
    """UTF-8 bytes of a name."""
    nesting: int = 3
    """Nested lists inside an argument."""
    dimensions: int = 16
    batch: int = 1 << 20
    """Samples of a microbatch."""
    tensor_bytes: int = 4096 * MIB
    """Bytes of any one tensor: input, parameter or result of a call."""
    parameter_bytes: int = 16_384 * MIB
    """Bytes of all parameters and buffers."""
    result_bytes: int = 131_072 * MIB
    """Bytes of all results of one forward together, if none were freed."""
    flops: int = 10**15
    """FLOPs of one forward."""


DEFAULT_LIMITS = GraphLimits()


def check_structure(spec: BlockSpec, limits: GraphLimits) -> None:
    """Raise ProtocolError unless the block is consistent and its declarations are within the limits."""
    _check_names(spec)
    _check_statistics(spec)
    _check_owned(spec, limits)


def _check_names(spec: BlockSpec) -> None:
    """Check that each value is made once and before it is read, and that every tensor has one owner."""
    for what, owned, specs in (
        ("parameter", spec.parameters, spec.parameter_specs),
        ("buffer", spec.buffers, spec.buffer_specs),
        ("statistic", spec.statistics, spec.statistic_specs),
    ):
        if set(owned.values()) != specs.keys():
            raise ProtocolError(f"the {what} names and the {what} specs of a block differ")
    kinds = [spec.parameter_specs, spec.buffer_specs, spec.statistic_specs]
    if len(set().union(*kinds)) != sum(map(len, kinds)):
        raise ProtocolError(f"block {spec.index} has a tensor of two kinds")
    made: set[str] = set()
    for names in (spec.inputs, spec.data, spec.parameters, spec.buffers, spec.statistics):
        _add(made, names)
    for node in spec.nodes:
        for name in node.references():
            if name not in made:
                raise ProtocolError(f"{node.name!r} reads the unknown value {name!r}")
        _add(made, (node.name,))
    for name in spec.outputs:
        if name not in made or name in spec.data or name in spec.owned:
            raise ProtocolError(f"the output {name!r} is not made here and does not pass through")


def _check_statistics(spec: BlockSpec) -> None:
    """Check that running values belong to one BatchNorm each, which alone reads them."""
    for tensor in spec.statistic_specs.values():
        if tensor.dtype != "float32" or tensor.grad or len(tensor.shape) != 1:
            raise ProtocolError("running statistics are float32 vectors without a gradient")
    read = Counter(name for node in spec.nodes for name in node.references() if name in spec.statistics)
    owned = [ref.name for node in spec.nodes if node.op == BATCH_NORM for ref in running_values(node)]
    if sorted(owned) != sorted(spec.statistics) or any(read[name] != 1 for name in spec.statistics):
        raise ProtocolError("running statistics and BatchNorms do not belong together one to one")
    if len(spec.statistic_specs) != len(spec.statistics):
        raise ProtocolError("two values are the same running statistic")


def _add(made: set[str], names: Iterable[str]) -> None:
    for name in names:
        if name in made:
            raise ProtocolError(f"the value {name!r} is made twice")
        made.add(name)


def _check_owned(spec: BlockSpec, limits: GraphLimits) -> None:
    """Refuse parameters, buffers and statistics that are too large or not as they must be."""
    if not 1 <= spec.batch <= limits.batch:
        raise ProtocolError(f"a microbatch of {spec.batch} samples is not between 1 and {limits.batch}")
    owned = {**spec.parameter_specs, **spec.buffer_specs, **spec.statistic_specs}
    if any(isinstance(size, Batch) for tensor in owned.values() for size in tensor.shape):
        raise ProtocolError("the size of a tensor that a block owns depends on the batch")
    for name, tensor in owned.items():
        check_tensor(name, tensor, limits)
    if sum(tensor.nbytes for tensor in owned.values()) > limits.parameter_bytes:
        raise ProtocolError(f"the tensors a block owns are over {limits.parameter_bytes} bytes")
    if any(not (tensor.grad and tensor.dtype == "float32") for tensor in spec.parameter_specs.values()):
        raise ProtocolError("a block's parameters are float32 and get a gradient")
    if spec.activation_bytes > limits.result_bytes:
        raise ProtocolError(f"block {spec.index} declares {spec.activation_bytes} bytes of activations")


def check_tensor(name: str, tensor: TensorSpec, limits: GraphLimits) -> None:
    """Raise ProtocolError unless a tensor, whose sizes are numbers, is within the limits."""
    if len(tensor.shape) > limits.dimensions:
        raise ProtocolError(
            f"{name!r} has {len(tensor.shape)} dimensions, over the limit of {limits.dimensions}"
        )
    if tensor.nbytes > limits.tensor_bytes:
        raise ProtocolError(f"{name!r} takes {tensor.nbytes} bytes, over the limit of {limits.tensor_bytes}")
