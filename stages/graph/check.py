"""Is a block from a stranger safe to run? Nothing of its declared size is allocated to find out.

Two passes over a block that was read from bytes: the graph against itself (every value made once and before it is
read, every tensor with one owner), then a dry run on tensors without memory, which compares the declared shapes and
FLOPs with what the operators really make. Left for the sandbox around the worker: faults in torch's own kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetpeer.dht.errors import ProtocolError
from hetpeer.stages.graph.cost import Value, measure
from hetpeer.stages.graph.spec import BlockSpec, Node, TensorSpec

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one block may ask of a peer; a block beyond any of these is refused."""

    packed_bytes: int = MIB
    """Bytes of the packed block; a transformer layer takes about 2 KiB."""
    items: int = 20_000
    """Entries of one list or map, so also operator calls of one block; and tensors they make."""
    name_length: int = 512
    """UTF-8 bytes of a name."""
    nesting: int = 3
    """Lists inside an argument."""
    dimensions: int = 16
    tensor_bytes: int = 4096 * MIB
    """Bytes of any one tensor: input, parameter or result of a call."""
    parameter_bytes: int = 16_384 * MIB
    """Bytes of all parameters and buffers."""
    result_bytes: int = 131_072 * MIB
    """Bytes of all results of one forward pass together, were none freed."""
    flops: int = 10**15
    """FLOPs of one forward pass."""


def check_block(spec: BlockSpec, limits: Limits) -> None:
    """Raise ProtocolError unless the block is consistent, within the limits, and what it says it is."""
    _check_names(spec)
    _check_sizes(spec, limits)
    _dry_run(spec, limits)


def _check_names(spec: BlockSpec) -> None:
    """Each value is made once and before it is read, and every tensor has one owner."""
    made: set[str] = set()
    for names in (spec.inputs, spec.data, spec.parameters, spec.buffers):
        _add(made, names)
    for node in spec.nodes:
        for name in node.references():
            if name not in made:
                raise ProtocolError(f"{node.name!r} reads the unknown value {name!r}")
        _add(made, (node.name,))
    for name in spec.outputs:
        if name not in made or name in spec.data or name in spec.parameters or name in spec.buffers:
            raise ProtocolError(f"the output {name!r} is not made here and does not pass through")
    for what, names, specs in (
        ("parameter", spec.parameters, spec.parameter_specs),
        ("buffer", spec.buffers, spec.buffer_specs),
    ):
        if set(names.values()) != specs.keys():
            raise ProtocolError(f"the {what} names and the {what} specs of a block differ")
    if both := spec.parameter_specs.keys() & spec.buffer_specs.keys():
        raise ProtocolError(f"{min(both)!r} is both a parameter and a buffer")


def _add(made: set[str], names: Iterable[str]) -> None:
    for name in names:
        if name in made:
            raise ProtocolError(f"the value {name!r} is made twice")
        made.add(name)


def _check_sizes(spec: BlockSpec, limits: Limits) -> None:
    owned = {**spec.parameter_specs, **spec.buffer_specs}
    for name, tensor in {**spec.inputs, **spec.data, **owned}.items():
        _check_tensor(name, tensor, limits)
    if sum(tensor.nbytes for tensor in owned.values()) > limits.parameter_bytes:
        raise ProtocolError(f"the tensors a block owns are over {limits.parameter_bytes} bytes")
    if any(not (tensor.grad and tensor.dtype == "float32") for tensor in spec.parameter_specs.values()):
        raise ProtocolError("a block's parameters are float32 and get a gradient")
    if any(tensor.grad for tensor in (*spec.buffer_specs.values(), *spec.data.values())):
        raise ProtocolError("a block's buffers and data get no gradient")
    if any(
        tensor.grad and not tensor.dtype.startswith(("float", "bfloat")) for tensor in spec.inputs.values()
    ):
        raise ProtocolError("only a floating-point tensor gets a gradient")
    scalar = {spec.loss: TensorSpec(shape=(), dtype="float32", grad=True)}
    if spec.loss is not None and spec.outputs != scalar:
        raise ProtocolError("the block with the loss puts out more or else than one float32 scalar")


def _dry_run(spec: BlockSpec, limits: Limits) -> None:
    """Run the block on meta tensors and compare what it declares with what comes out."""
    results, result_bytes, flops = 0, 0, 0

    def check(node: Node, value: Value, node_flops: int) -> None:
        nonlocal results, result_bytes, flops
        for tensor in (value,) if isinstance(value, TensorSpec) else value:
            _check_tensor(node.name, tensor, limits)
            results += 1
            result_bytes += tensor.nbytes
        flops += node_flops
        if results > limits.items or result_bytes > limits.result_bytes or flops > limits.flops:
            raise ProtocolError(f"block {spec.index} computes more than a peer offers, at {node.name!r}")

    given = {**spec.inputs, **spec.data}
    given |= {name: spec.parameter_specs[fqn] for name, fqn in spec.parameters.items()}
    given |= {name: spec.buffer_specs[fqn] for name, fqn in spec.buffers.items()}
    values = {**given, **measure(spec.nodes, given, check).values}
    for name, declared in spec.outputs.items():
        _check_output(name, declared, values[name])
    if flops != spec.flops_forward:
        raise ProtocolError(f"block {spec.index} declares {spec.flops_forward} FLOPs and takes {flops}")
    if spec.activation_bytes > limits.result_bytes:
        raise ProtocolError(f"block {spec.index} declares {spec.activation_bytes} bytes of activations")


def _check_output(name: str, declared: TensorSpec, value: Value) -> None:
    """A gradient may be declared away (nothing after this block needs it), never invented."""
    fits = (
        isinstance(value, TensorSpec)
        and (value.shape, value.dtype) == (declared.shape, declared.dtype)
        and value.grad >= declared.grad
    )
    if not fits:
        raise ProtocolError(f"the output {name!r} is not what it is declared as, {declared}")


def _check_tensor(name: str, tensor: TensorSpec, limits: Limits) -> None:
    if len(tensor.shape) > limits.dimensions:
        raise ProtocolError(
            f"{name!r} has {len(tensor.shape)} dimensions, over the limit of {limits.dimensions}"
        )
    if tensor.nbytes > limits.tensor_bytes:
        raise ProtocolError(f"{name!r} takes {tensor.nbytes} bytes, over the limit of {limits.tensor_bytes}")
