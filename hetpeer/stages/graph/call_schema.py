"""Rules for calls in a block: known operators, known argument names, known constants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import ITEM_BYTES, Argument, OperatorCall, Symbol
from hetpeer.stages.graph.operators import OPERATORS
from hetpeer.stages.graph.own_operators import PASS_OPERATORS

EQUATION = re.compile(r"[A-Za-z.,>\- ]{1,100}")

MOVES = frozenset(
    {
        "getitem",
        "aten._unsafe_view.default",
        "aten.alias.default",
        "aten.cat.default",
        "aten.chunk.default",
        "aten.clone.default",
        "aten.detach.default",
        "aten.expand.default",
        "aten.flatten.using_ints",
        "aten.permute.default",
        "aten.reshape.default",
        "aten.select.int",
        "aten.slice.Tensor",
        "aten.split.Tensor",
        "aten.split_with_sizes.default",
        "aten.squeeze.dim",
        "aten.stack.default",
        "aten.t.default",
        "aten.transpose.int",
        "aten.broadcast_tensors.default",
        "aten.expand_as.default",
        "aten.flip.default",
        "aten.movedim.int",
        "aten.narrow.default",
        "aten.pixel_shuffle.default",
        "aten.repeat.default",
        "aten.repeat_interleave.self_int",
        "aten.roll.default",
        "aten.squeeze.default",
        "aten.squeeze.dims",
        "aten.unflatten.int",
        "aten.view_as.default",
        "aten.unbind.int",
        "aten.unsqueeze.default",
        "aten.view.default",
    }
)
"""Operators that compute nothing and only rearrange."""

FACTORIES = frozenset(
    {
        "aten.eye.default",
        "aten.linspace.default",
        "aten.arange.default",
        "aten.arange.start",
        "aten.arange.start_step",
        "aten.full.default",
        "aten.ones.default",
        "aten.scalar_tensor.default",
        "aten.zeros.default",
    }
)
"""Operators that make a tensor from no tensor.

The runner tells them its device, which in a dry run keeps them from allocating. All others compute where
their arguments are.
"""

KEYWORDS = frozenset(
    {
        "alpha",
        "approximate",
        "beta",
        "correction",
        "dtype",
        "enable_gqa",
        "keepdim",
        "log_target",
        "memory_format",
        "output_size",
        "path",
        "rounding_mode",
        "scale",
        "stable",
        "value",
    }
)
"""Arguments that may be given by name."""

SYMBOLS: Mapping[str, Mapping[str, Any]] = {
    "dtype": {name: getattr(torch, name) for name in ITEM_BYTES},
    "memory_format": {
        "contiguous_format": torch.contiguous_format,
        "preserve_format": torch.preserve_format,
        "channels_last": torch.channels_last,
    },
    "text": {
        text: text
        for text in ("none", "tanh", "floor", "trunc", "constant", "reflect", "replicate", "circular")
    },
}
"""Kind → value → torch's constant."""


def check_call(node: OperatorCall) -> None:
    """Raise ProtocolError unless the table allows this call.

    The operator may be unknown (it is named), or an argument not allowed in graphs. Shapes and types of
    arguments are left to the dry run.
    """
    if node.op not in OPERATORS and node.op not in PASS_OPERATORS:
        raise ProtocolError(f"operator {node.op!r} is not allowed in a block")
    for keyword in node.kwargs:
        if keyword not in KEYWORDS:
            raise ProtocolError(f"operator {node.op} has the unknown argument {keyword!r}")
    for argument in (*node.args, *node.kwargs.values()):
        _check_symbols(node, argument)


def _check_symbols(node: OperatorCall, argument: Argument) -> None:
    if isinstance(argument, Symbol) and not _is_known(node, argument):
        raise ProtocolError(f"operator {node.op} has the unknown {argument.kind} {argument.value!r}")
    if isinstance(argument, tuple):
        for item in argument:
            _check_symbols(node, item)


def _is_known(node: OperatorCall, symbol: Symbol) -> bool:
    """Whether a symbol is known; an einsum's equation is the only free text."""
    if symbol.kind == "text" and node.op == "aten.einsum.default":
        return EQUATION.fullmatch(symbol.value) is not None
    return symbol.value in SYMBOLS.get(symbol.kind, {})


def constant(symbol: Symbol) -> Any:
    """Torch's constant for a symbol that `check_call` has accepted."""
    return SYMBOLS[symbol.kind].get(symbol.value, symbol.value)
