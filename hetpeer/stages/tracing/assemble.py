"""Blocks made of pieces of the operator graph: inputs, outputs, owned tensors, costs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetpeer.stages.graph.block_spec import BlockSpec, OperatorCall, TensorSpec
from hetpeer.stages.graph.graph_cost import activation_bytes
from hetpeer.stages.tracing.refusals import unfit
from hetpeer.stages.tracing.trace import OpDag

CARRIED = "bfloat16"
"""Dtype in which autocast's float32 tensors cross borders."""

LARGEST = 3.3895313892515355e38
"""Largest bfloat16. Masks are often filled with the least float32 (`torch.finfo`), which is beyond it."""

FILL = "aten.masked_fill.Scalar"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeMode:
    """Mode of computing blocks: under bf16 autocast, and with recomputation instead of kept activations."""

    autocast: bool = False
    recompute: bool = False


def tensor_specs(dag: OpDag, names: Iterable[str]) -> dict[str, TensorSpec]:
    """The specs of values that are single tensors."""
    specs = {}
    for name in names:
        value = dag.values[name]
        assert isinstance(value, TensorSpec)
        specs[name] = value
    return specs


def make_block(
    dag: OpDag,
    index: int,
    nodes: Sequence[OperatorCall],
    crossing: tuple[Collection[str], Collection[str]],
    copied: Collection[str],
    mode: ComputeMode,
) -> BlockSpec:
    """The block that runs `nodes` and those of the `copied` nodes that they need.

    `crossing` names the values at its two borders: none at the model's ends.
    """
    nodes = _with_copies(dag, nodes, copied)
    if mode.autocast:
        nodes = tuple(map(_fitting_fill, nodes))
    used = {name for node in nodes for name in node.references()}
    last = not crossing[1]
    spec = BlockSpec(
        index=index,
        inputs=_carried(tensor_specs(dag, crossing[0]), mode),
        outputs=tensor_specs(dag, [dag.loss]) if last else _carried(tensor_specs(dag, crossing[1]), mode),
        data=tensor_specs(dag, (name for name in dag.inputs if name in used)),
        nodes=nodes,
        **_owned(dag, used),
        batch=dag.batch,
        flops_forward=sum(dag.flops[node.name] for node in nodes),
        activation_bytes=0,
        loss=dag.loss if last else None,
        autocast=mode.autocast,
        recompute=mode.recompute,
    )
    return replace(spec, activation_bytes=activation_bytes(spec))


def _owned(dag: OpDag, used: Collection[str]) -> dict[str, Any]:
    """The six fields of a block about the tensors that it owns."""
    fields: dict[str, Any] = {}
    for kind, all_names in (
        ("parameter", dag.parameters),
        ("buffer", dag.buffers),
        ("statistic", dag.statistics),
    ):
        names = {value: name for value, name in all_names.items() if value in used}
        specs = {names[value]: spec for value, spec in tensor_specs(dag, names).items()}
        fields |= {f"{kind}s": names, f"{kind}_specs": specs}
    return fields


def _fitting_fill(node: OperatorCall) -> OperatorCall:
    """A mask's fill value within bfloat16's range: the trace has the author's constant for float32 scores."""
    match node.args:
        case (scores, mask, float() as value) if node.op == FILL and math.isfinite(value):
            return replace(node, args=(scores, mask, min(max(value, -LARGEST), LARGEST)))
    return node


def _carried(specs: Mapping[str, TensorSpec], mode: ComputeMode) -> dict[str, TensorSpec]:
    """Tensors between blocks in the dtypes in which they cross: bfloat16 for float32 under autocast."""
    if not mode.autocast:
        return dict(specs)
    for name, spec in specs.items():
        if spec.dtype in (CARRIED, "float16", "float64"):
            raise unfit(
                f"a bf16 run would carry {name!r} of {spec.dtype} from block to block",
                f"blocks of a bf16 run hand on {CARRIED} alone",
                "let the model compute in float32: the run's dtype casts by itself",
            )
    return {n: replace(s, dtype=CARRIED) if s.dtype == "float32" else s for n, s in specs.items()}


def _with_copies(
    dag: OpDag, nodes: Sequence[OperatorCall], copied: Collection[str]
) -> tuple[OperatorCall, ...]:
    """The nodes of a piece and the copied operators that they need, in the author's order."""
    wanted = {node.name for node in nodes}
    for node in reversed(dag.nodes):
        if node.name in wanted:
            wanted.update(name for name in node.references() if name in copied)
    return tuple(node for node in dag.nodes if node.name in wanted)
