"""What a block's operators do with its parameters: which may be kept in bfloat16, and which have gradients of
few rows.

No torch: the daemon counts bytes with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetpeer.stages.graph.block_spec import ITEM_BYTES, BlockSpec, OperatorCall, Ref
from hetpeer.stages.operators.names import EMBEDDING, PRODUCTS


def _read_once(spec: BlockSpec) -> Iterator[tuple[str, str, OperatorCall]]:
    """(value, name, the call) of each float32 parameter that one call reads, and nothing else."""
    readers: dict[str, list[OperatorCall]] = {}
    for node in spec.nodes:
        for value in node.references():
            readers.setdefault(value, []).append(node)
    names = list(spec.parameters.values())
    for value, name in spec.parameters.items():
        reading = readers.get(value, [])
        alone = len(reading) == 1 and names.count(name) == 1 and value not in spec.outputs
        if alone and spec.parameter_specs[name].dtype == "float32":
            yield value, name, reading[0]


def cast_parameters(spec: BlockSpec) -> frozenset[str]:
    """Names of the parameters of a bf16 block that one product reads, and nothing else.

    Autocast rounds such a parameter to bfloat16 in each forward, and the product gives its gradient in
    bfloat16. With two readers the gradients would be added up in bfloat16 instead of float32.
    """
    if not spec.autocast:
        return frozenset()
    return frozenset(name for _, name, node in _read_once(spec) if node.op in PRODUCTS)


def cast_count(spec: BlockSpec) -> int:
    """Elements of those parameters."""
    return sum(spec.parameter_specs[name].count for name in cast_parameters(spec))


def without_copies(spec: BlockSpec) -> BlockSpec:
    """The block with those parameters kept in bfloat16: no microbatch keeps copies that autocast makes."""
    if spec.recompute:
        return spec
    cast = [spec.parameter_specs[name] for name in cast_parameters(spec)]
    # a bias is read in no backward
    copies = ITEM_BYTES["bfloat16"] * sum(tensor.count for tensor in cast if len(tensor.shape) > 1)
    return replace(spec, activation_bytes=spec.activation_bytes - copies)


def weight_bytes(spec: BlockSpec) -> int:
    """Bytes of parameters and running statistics on a device that keeps what it can in bfloat16."""
    halved = cast_count(spec)
    return ITEM_BYTES["float32"] * (spec.vector_count - halved) + ITEM_BYTES["bfloat16"] * halved


def looked_up(spec: BlockSpec) -> dict[str, str]:
    """Value → name of the parameters in which one embedding looks rows up, and that nothing else reads.

    The gradient of such a table is zero but for the rows that a microbatch names.
    """
    return {value: name for value, name, node in _read_once(spec) if _looks_up(node, value)}


def looked_up_count(spec: BlockSpec) -> int:
    """Elements of those tables."""
    return sum(spec.parameter_specs[name].count for name in looked_up(spec).values())


def _looks_up(node: OperatorCall, value: str) -> bool:
    """Whether the call is an embedding in the table `value`, without scaling by frequency."""
    return node.op == EMBEDDING and node.args[0] == Ref(value) and not any(node.args[3:]) and not node.kwargs


def by_rows(spec: BlockSpec) -> tuple[OperatorCall, ...]:
    """The block's calls; those of `looked_up` give their gradient as a sparse tensor of the rows named."""
    tables = {Ref(value) for value in looked_up(spec)}
    return tuple(
        replace(node, args=(*node.args[:2], *(node.args[2:3] or (-1,)), False, True))
        if node.op == EMBEDDING and node.args[0] in tables
        else node
        for node in spec.nodes
    )
