"""Frozen tensors of a traced model in fewer bytes, and back (operators/frozen_operators.py).

A stored tensor stands in the graph beside an operator that makes the float tensor of it. The operator's
result has the frozen tensor's own value name, so no other call changes. Vectors (norms, biases) stay as they
are, since they are small.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import Argument, OperatorCall, Ref, TensorSpec
from hetpeer.stages.operators.frozen_operators import (
    FROM_INT4,
    FROM_INT8,
    GROUP,
    WIDEN,
    ZERO,
    from_int4,
    from_int8,
)
from hetpeer.stages.operators.names import PRODUCTS
from hetpeer.stages.tracing.trace import OpDag

FORMS = ("bf16", "int8", "int4")
OPERATORS: Mapping[str, str] = {"bf16": WIDEN, "int8": FROM_INT8, "int4": FROM_INT4}
LARGEST: Mapping[str, int] = {"int8": 127, "int4": 7}
"""Form → the whole number that stands for the largest of a group."""
SCALES = "scales"


def stored(dag: OpDag, names: Collection[str], form: str) -> OpDag:
    """`dag` with those of its frozen float32 tensors `names` that have two or more dimensions in `form`.

    int4 needs an even last dimension; others are stored as int8. Those that only products read are marked:
    under autocast they are made in bfloat16.
    """
    readers: dict[str, set[str]] = {}
    for node in dag.nodes:
        for value in node.references():
            readers.setdefault(value, set()).add(node.op)
    chosen = {value: name for value, name in dag.buffers.items() if name in names and _is_large(dag, value)}
    buffers = {value: name for value, name in dag.buffers.items() if value not in chosen}
    tensors = {name: tensor for name, tensor in dag.tensors.items() if name not in chosen.values()}
    values, flops, made = dict(dag.values), dict(dag.flops), list[OperatorCall]()
    for value, name in chosen.items():
        spec = dag.at(value)
        assert isinstance(spec, TensorSpec)
        own = "int8" if form == "int4" and spec.sizes[-1] % 2 else form
        parts = packed(dag.tensors[name], own)
        for part, tensor in parts.items():
            buffers[f"{value}.{part}"], tensors[f"{name}:{part}"] = f"{name}:{part}", tensor
            kind = str(tensor.dtype).removeprefix("torch.")
            values[f"{value}.{part}"] = TensorSpec(shape=tuple(tensor.shape), dtype=kind)
        flops[value] = spec.count
        reads = (Ref(f"{value}.{part}") for part in parts)
        args: tuple[Argument, ...] = (*reads, readers[value] <= PRODUCTS)
        made.append(OperatorCall(name=value, op=OPERATORS[own], args=args, kwargs={}))
    return replace(
        dag, nodes=(*made, *dag.nodes), buffers=buffers, values=values, flops=flops, tensors=tensors
    )


def _is_large(dag: OpDag, value: str) -> bool:
    spec = dag.values[value]
    return isinstance(spec, TensorSpec) and spec.dtype == "float32" and len(spec.shape) >= 2


def packed(tensor: Tensor, form: str) -> dict[str, Tensor]:
    """The stored tensors of a float32 tensor: its form → numbers, and for int8 and int4 `SCALES` → scales."""
    if form == "bf16":
        return {form: tensor.to(torch.bfloat16)}
    flat = tensor.detach().reshape(-1)
    groups = pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)
    scales = groups.abs().amax(dim=1) / LARGEST[form]
    steps = groups / torch.where(scales > 0, scales, 1.0)[:, None]
    whole = steps.round().clamp(-LARGEST[form], LARGEST[form]).to(torch.int8)
    numbers = whole.view(-1)[: flat.numel()].view(tensor.shape)
    if form == "int4":
        halves = (numbers + ZERO).to(torch.uint8)
        numbers = halves[..., ::2] | halves[..., 1::2] << 4
    return {form: numbers, SCALES: scales}


def unpacked(parts: Mapping[str, Tensor]) -> Tensor:
    """The float32 tensor that `packed` has stored. Raises `ProtocolError` if parts are missing."""
    try:
        if "bf16" in parts:
            return parts["bf16"].float()
        make, form = (from_int8, "int8") if "int8" in parts else (from_int4, "int4")
        return make(parts[form], parts[SCALES], product=False)
    except (KeyError, ValueError) as error:
        raise ProtocolError("a stored tensor is incomplete", why=str(error)) from error


def restored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors`, with each stored one as float32 under its own name."""
    plain: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        whole, colon, part = name.rpartition(":")
        if colon and part in (*FORMS, SCALES):
            parts.setdefault(whole, {})[part] = tensor
        else:
            plain[name] = tensor
    return plain | {name: unpacked(own) for name, own in parts.items()}
