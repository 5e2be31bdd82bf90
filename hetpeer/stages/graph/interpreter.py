"""The interpreter: a list of operator calls, checked and prepared once, run many times.

A call in a block has a known operator, known argument names and known constants (`check_call`).
block/block.py runs a Program on real tensors, graph_cost.py and safety_check.py on tensors without memory.
Table look-ups and the moment of each value's last read are settled when a Program is made, so a run is one
loop over calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import ITEM_BYTES, Argument, OperatorCall, Ref, Symbol, references
from hetpeer.stages.operators.indexed_operators import INDEX_GUARDS, Guard
from hetpeer.stages.operators.operator_family import Operator
from hetpeer.stages.operators.operators import find_operator, operator_of
from hetpeer.stages.operators.own_operators import Pass

KEYWORDS = frozenset(
    {
        "alpha",
        "approximate",
        "beta",
        "correction",
        "descending",
        "dtype",
        "enable_gqa",
        "include_self",
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
        for text in (
            "none",
            "tanh",
            "floor",
            "trunc",
            "constant",
            "reflect",
            "replicate",
            "circular",
            "same",
            "valid",
            "sum",
            "mean",
            "amax",
            "amin",
            "ij",
            "xy",
        )
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


Observer = Callable[[OperatorCall, Any], None]


@dataclass(frozen=True, slots=True)
class _Call:
    node: OperatorCall
    operator: Operator
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    last_reads: tuple[str, ...]
    """Values that nobody reads after this call."""
    guard: Guard | None
    """Check of its indices, on a GPU."""


class Program:
    """Operator calls bound to one device; `keep` names the values that a run returns.

    The nodes have passed `check_call`, and every value is made before it is read.

        program = Program(spec.nodes, spec.outputs, torch.device("cpu"))
        outputs = program.run(values, Pass(draw=None))  # name → tensor
    """

    def __init__(self, nodes: Sequence[OperatorCall], keep: Collection[str], device: torch.device) -> None:
        self._keep = tuple(keep)
        last: dict[str, int] = {}
        for position, node in enumerate(nodes):
            last[node.name] = position
            last.update((name, position) for name in node.references())
        dying: list[list[str]] = [[] for _ in nodes]
        for name, position in last.items():
            if name not in keep:
                dying[position].append(name)
        self._calls = [
            _Call(
                node,
                operator,
                tuple(map(_prepare, node.args)),
                {key: _prepare(argument) for key, argument in node.kwargs.items()}
                | ({"device": device} if operator.factory else {}),
                tuple(names),
                INDEX_GUARDS.get(node.op) if device.type == "cuda" else None,
            )
            for node, names in zip(nodes, dying, strict=True)
            for operator in (operator_of(node.op),)
        ]

    def run(self, values: dict[str, Any], here: Pass, observe: Observer | None = None) -> dict[str, Any]:
        """Execute all calls under the caller's grad mode. `values` is used up: each is dropped after its last
        read.

        `observe(node, result)` sees each result as it is made. Raises ProtocolError if an operator refuses
        its arguments; torch.OutOfMemoryError and errors of `observe` pass through.
        """
        for call in self._calls:
            args = [_fill(argument, values) for argument in call.args]
            kwargs = {key: _fill(argument, values) for key, argument in call.kwargs.items()}
            try:
                if call.guard is not None:
                    call.guard(*args, **kwargs)
                first = (here, call.node.name) if call.operator.in_pass else ()
                result = call.operator.run(*first, *args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a kernel may raise anything for hostile arguments
                line = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ProtocolError(f"{call.node.op} cannot compute {call.node.name!r}", why=line) from error
            del args, kwargs
            if observe is not None:
                observe(call.node, result)
            values[call.node.name] = result
            for name in call.last_reads:
                del values[name]
        return {name: values[name] for name in self._keep}


def _prepare(argument: Argument) -> Any:
    """Torch's argument, with Refs left in; `_fill` looks into lists only, not into tuples."""
    if isinstance(argument, Symbol):
        return SYMBOLS[argument.kind].get(argument.value, argument.value)
    if isinstance(argument, tuple):
        items = list(map(_prepare, argument))
        return items if any(True for _ in references(argument)) else tuple(items)
    return argument


def _fill(argument: Any, values: Mapping[str, Any]) -> Any:
    kind = type(argument)
    if kind is Ref:
        return values[argument.name]
    if kind is list:
        return [_fill(item, values) for item in argument]
    return argument
