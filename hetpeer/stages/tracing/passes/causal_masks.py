"""Masks of attention that are exactly causal, replaced by the flag `is_causal`.

transformers leaves a causal mask out where attention has that flag, but not while it is traced. The mask
takes [batch, 1, T, T] elements, and with it attention computes the half that the mask hides. Its values
depend on nothing, so they are computed here and compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import Argument, OperatorCall, Ref, Size, TensorSpec, Value
from hetpeer.stages.graph.interpreter import Program
from hetpeer.stages.operators.names import ATTENTION
from hetpeer.stages.operators.operators import operator_of
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.tracing.draws import SDPA

FEW = 2
"""Samples for which a mask is computed. Any size is a multiple of the batch."""
MOST_BYTES = 1 << 30
"""A mask of more bytes, or made of such tensors, is not looked at: 23,170 tokens of bool."""
HIDDEN = -1e30
"""An additive mask below this hides: exp underflows to 0, as it does for the least float32."""
CPU = torch.device("cpu")
MASK, FLAG = 3, 5
"""Positions of the mask and of `is_causal` among the arguments of attention, torch's and ours."""


def with_causal_flag(
    nodes: Sequence[OperatorCall], values: Mapping[str, Value], constants: Mapping[str, Tensor]
) -> list[OperatorCall]:
    """The calls, with `is_causal` instead of each mask that is causal and depends on `constants` alone.

    Numbers stay the same up to the order of additions: torch then skips what the mask hides.
    """
    found: dict[str, bool] = {}
    result = []
    for node in nodes:
        mask = _square_mask(node, values, constants)
        if mask is not None and mask not in found:
            found[mask] = _is_causal(mask, nodes, values, constants)
        flagged = mask is not None and found[mask]
        result.append(replace(node, args=_flagged(node.args)) if flagged else node)
    return result


def _square_mask(
    node: OperatorCall, values: Mapping[str, Value], constants: Mapping[str, Tensor]
) -> str | None:
    """The mask of an attention whose queries, keys and mask are of one length; None for any other call."""
    if node.op not in (SDPA, ATTENTION) or len(node.args) <= MASK or any(node.args[FLAG : FLAG + 1]):
        return None
    names = [argument.name for argument in node.args[: MASK + 1] if isinstance(argument, Ref)]
    if len(names) <= MASK:
        return None
    query, key, _, mask = (_shape(values.get(name, constants.get(name))) for name in names)
    lengths = {query[-2:-1], key[-2:-1], mask[-2:-1], mask[-1:]}
    return names[MASK] if len(lengths) == 1 and () not in lengths else None


def _shape(value: Value | Tensor | None) -> tuple[Size, ...]:
    """Shape of a single tensor; empty if it is unknown."""
    return () if value is None or isinstance(value, tuple) else tuple(value.shape)


def _flagged(args: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """Arguments of attention without a mask and with the flag."""
    dropout = args[MASK + 1] if len(args) > MASK + 1 else 0.0
    return (*args[:MASK], None, dropout, True, *args[FLAG + 1 :])


def _is_causal(
    mask: str, nodes: Sequence[OperatorCall], values: Mapping[str, Value], constants: Mapping[str, Tensor]
) -> bool:
    """Whether a mask hides exactly what comes later; False if it depends on samples or parameters."""
    wanted, needed = {mask}, []
    for node in reversed(nodes):
        if node.name in wanted:
            wanted.update(node.references())
            needed.append(node)
    needed.reverse()
    made = {node.name for node in needed}
    if any(operator_of(node.op).in_pass for node in needed) or not wanted - made <= constants.keys():
        return False
    if any(_largest(values[name]) > MOST_BYTES for name in made):
        return False
    given = {name: constants[name] for name in wanted - made}
    try:
        with torch.no_grad():
            program = Program([node.at(FEW) for node in needed], (mask,), CPU)
            tensor: Tensor = program.run(dict(given), Pass(None))[mask]
    except ProtocolError:  # a mask that cannot be computed is refused elsewhere, or stays as it is
        return False
    return _hides_later(tensor)


def _largest(value: Value) -> int:
    """Bytes of the largest tensor of a value."""
    parts = (value,) if isinstance(value, TensorSpec) else value
    return max(part.at(FEW).nbytes for part in parts)


def _hides_later(mask: Tensor) -> bool:
    """Whether a mask [… T, T], of bool or additive, lets each position see itself and what is before."""
    seen = mask
    if mask.dtype != torch.bool:
        seen = mask == 0
        if not bool((seen | (mask < HIDDEN)).all()):
            return False
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool, device=CPU).tril()
    return bool((seen == causal).all())
