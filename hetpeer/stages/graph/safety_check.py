"""The safety check of a block from a stranger; it allocates nothing of the block's declared size.

A consistent block (structure_check.py) may name known operators only. It is then run on tensors without
memory, and the declared shapes and FLOPs are compared with the results. This runs torch's code on a
stranger's data, so it is done in the sandbox in which the block is to run, which contains faults of torch's
kernels.
"""

from __future__ import annotations

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import BlockSpec, OperatorCall, TensorSpec, Value
from hetpeer.stages.graph.block_wire import read_block
from hetpeer.stages.graph.graph_cost import measure
from hetpeer.stages.graph.interpreter import check_call
from hetpeer.stages.graph.structure_check import DEFAULT_LIMITS, GraphLimits, check_tensor

FEWER = 2
"""Another number of samples to check. Not 1: BatchNorm over one sample has no variance."""


def unpack_block(data: bytes, limits: GraphLimits = DEFAULT_LIMITS) -> BlockSpec:
    """Read and check a block; allocates nothing of its declared size. Raises ProtocolError for any defect.

    Takes milliseconds for a transformer layer, and up to seconds for a hostile block within the limits. The
    first call in a process imports torch's compiler, which takes seconds.
    """
    spec = read_block(data, limits)
    for node in spec.nodes:
        check_call(node)
    check_run(spec, limits)
    return spec


def check_run(spec: BlockSpec, limits: GraphLimits) -> None:
    """Raise ProtocolError unless a consistent block runs within the limits and is what it declares."""
    flops = check_at(spec, spec.batch, limits)
    if flops != spec.flops_forward:
        raise ProtocolError(f"block {spec.index} declares {spec.flops_forward} FLOPs and takes {flops}")
    if spec.batch > FEWER and spec.at(FEWER) != spec.at(spec.batch):
        check_at(
            spec, FEWER, limits
        )  # what holds at two sizes holds at all: everything is a multiple of the batch


def check_at(spec: BlockSpec, batch: int, limits: GraphLimits) -> int:
    """FLOPs of the block for `batch` samples. Raises ProtocolError unless it makes what it declares."""
    sizes = spec.at(batch)
    _check_sizes(sizes, limits)
    return _dry_run(sizes, limits)


def _check_sizes(spec: BlockSpec, limits: GraphLimits) -> None:
    """Refuse inputs, data or a loss of a wrong size or dtype."""
    for name, tensor in {**spec.inputs, **spec.data}.items():
        check_tensor(name, tensor, limits)
    if any(tensor.grad for tensor in (*spec.buffer_specs.values(), *spec.data.values())):
        raise ProtocolError("a block's buffers and data get no gradient")
    if any(
        tensor.grad and not tensor.dtype.startswith(("float", "bfloat")) for tensor in spec.inputs.values()
    ):
        raise ProtocolError("only a floating-point tensor gets a gradient")
    scalar = {spec.loss: TensorSpec(shape=(), dtype="float32", grad=True)}
    if spec.loss is not None and spec.outputs != scalar:
        raise ProtocolError("the block with the loss puts out more or else than one float32 scalar")


def _dry_run(spec: BlockSpec, limits: GraphLimits) -> int:
    """FLOPs of the block on meta tensors, after comparing its declarations with the results."""
    results, result_bytes, flops = 0, 0, 0

    def check(node: OperatorCall, value: Value, node_flops: int) -> None:
        nonlocal results, result_bytes, flops
        for tensor in (value,) if isinstance(value, TensorSpec) else value:
            check_tensor(node.name, tensor, limits)
            results += 1
            result_bytes += tensor.nbytes
        flops += node_flops
        if results > limits.items or result_bytes > limits.result_bytes or flops > limits.flops:
            raise ProtocolError(f"block {spec.index} computes more than a peer offers, at {node.name!r}")

    given = {**spec.entering, **spec.data, **spec.owned}
    values = {**given, **measure(spec.nodes, given, check).values}
    for name, declared in spec.outputs.items():
        _check_output(name, declared, values[name], carried=spec.autocast)
    return flops


def _check_output(name: str, declared: TensorSpec, value: Value, *, carried: bool) -> None:
    """Check one output. A gradient may be declared away (nothing later needs it), never invented."""
    dtypes = {declared.dtype, "float32"} if carried and declared.dtype == "bfloat16" else {declared.dtype}
    fits = (
        isinstance(value, TensorSpec)
        and value.shape == declared.shape
        and value.dtype in dtypes
        and value.grad >= declared.grad
    )
    if not fits:
        raise ProtocolError(f"the output {name!r} is not what it is declared as, {declared}")
