"""Rules for calls in a block: known operators, known argument names, known constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import ITEM_BYTES, Argument, OperatorCall, Symbol
from hetpeer.stages.graph.operator_family import Operator
from hetpeer.stages.graph.operators import find_operator

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
"""Arguments that any operator may be given by name."""

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
    """Raise ProtocolError unless the registry allows this call.

    The operator may be unknown (it is named), or an argument not allowed in graphs. Shapes and types of
    arguments are left to the dry run.
    """
    operator = find_operator(node.op)
    if operator is None:
        raise ProtocolError(f"operator {node.op!r} is not allowed in a block")
    for keyword in node.kwargs:
        if keyword not in KEYWORDS and keyword not in operator.keywords:
            raise ProtocolError(f"operator {node.op} has the unknown argument {keyword!r}")
    for argument in (*node.args, *node.kwargs.values()):
        _check_symbols(node, operator, argument)


def _check_symbols(node: OperatorCall, operator: Operator, argument: Argument) -> None:
    if isinstance(argument, Symbol) and not _is_known(operator, argument):
        raise ProtocolError(f"operator {node.op} has the unknown {argument.kind} {argument.value!r}")
    if isinstance(argument, tuple):
        for item in argument:
            _check_symbols(node, operator, item)


def _is_known(operator: Operator, symbol: Symbol) -> bool:
    if symbol.kind == "text" and operator.text is not None:
        return operator.text.fullmatch(symbol.value) is not None
    return symbol.value in SYMBOLS.get(symbol.kind, {})


def constant(symbol: Symbol) -> Any:
    """Torch's constant for a symbol that `check_call` has accepted."""
    return SYMBOLS[symbol.kind].get(symbol.value, symbol.value)
