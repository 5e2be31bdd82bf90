"""Parameters that may be kept in bfloat16, since autocast casts them anyway: the same bits, fewer bytes.

No torch: the daemon counts bytes with it.
"""

from __future__ import annotations

from collections import Counter

from hetpeer.stages.graph.block_spec import ITEM_BYTES, BlockSpec
from hetpeer.stages.operators.names import PRODUCTS


def cast_parameters(spec: BlockSpec) -> frozenset[str]:
    """Names of the parameters of a bf16 block that one product reads, and nothing else.

    Autocast rounds such a parameter to bfloat16 in each forward, and the product gives its gradient in
    bfloat16. With two readers the gradients would be added up in bfloat16 instead of float32.
    """
    if not spec.autocast:
        return frozenset()
    reads, elsewhere = Counter[str](), set[str]()
    for node in spec.nodes:
        for value in node.references():
            reads[value] += 1
            if node.op not in PRODUCTS:
                elsewhere.add(value)
    values = Counter(spec.parameters.values())
    return frozenset(
        name
        for value, name in spec.parameters.items()
        if reads[value] == 1
        and value not in elsewhere
        and values[name] == 1
        and value not in spec.outputs
        and spec.parameter_specs[name].dtype == "float32"
    )


def weight_bytes(spec: BlockSpec) -> int:
    """Bytes of parameters and running statistics on a device that keeps what it can in bfloat16."""
    cast = cast_parameters(spec)
    halved = sum(spec.parameter_specs[name].count for name in cast)
    return ITEM_BYTES["float32"] * (spec.vector_count - halved) + ITEM_BYTES["bfloat16"] * halved
