"""Numbers of a program's random draws, given before torch drops those that lead to no result.

Eager code runs a dropout whose result nobody reads, and it counts there. So each draw's number is written
into its node before decomposition, and read from it afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from hetpeer.stages.operators.drawn_operators import BERNOULLI, EXPONENTIAL, NORMAL, UNIFORM
from hetpeer.stages.tracing.refusals import unfit

DROPOUTS = frozenset(
    {
        "aten.dropout.default",
        "aten.dropout_.default",
        "aten.native_dropout.default",
        "aten.feature_dropout.default",
        "aten.feature_dropout_.default",
    }
)
RECURRENT = frozenset({"aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"})
"""Layers that draw only if their dropout, the sixth argument, is not 0."""
SDPA = "aten.scaled_dot_product_attention.default"
SIZED: Mapping[str, str] = {
    "aten.rand.default": UNIFORM,
    "aten.rand_like.default": UNIFORM,
    "aten.uniform.default": UNIFORM,
    "aten.randn.default": NORMAL,
    "aten.randn_like.default": NORMAL,
    "aten.normal_functional.default": NORMAL,
    "aten.exponential.default": EXPONENTIAL,
    "aten.bernoulli.p": BERNOULLI,
}
"""Draw of the decomposed graph → ours; all parameters but bernoulli's are torch's defaults."""
USUAL: Mapping[str, tuple[float, ...]] = {
    "aten.uniform.default": (0.0, 1.0),
    "aten.normal_functional.default": (0.0, 1.0),
    "aten.exponential.default": (1.0,),
}
"""Draw → the only bounds that it may have."""
MARK = "draws"


def number_draws(exported: ExportedProgram) -> None:
    """Write (number of the first draw, draws) into each node of the program that draws, regions included."""
    _number(exported.graph_module, 0)


def _number(module: fx.GraphModule, first: int) -> int:
    """Number the draws of one graph from `first`; returns the next number."""
    for node in module.graph.nodes:
        regions = [
            getattr(module, str(argument.target))
            for argument in node.args
            if isinstance(argument, fx.Node) and argument.op == "get_attr"
        ]
        parts = [region for region in regions if isinstance(region, fx.GraphModule)]
        after = first + (node.op == "call_function" and draws(node))
        for part in parts:
            after = _number(part, after)
        if after > first:
            node.meta["custom"] = {**node.meta.get("custom", {}), MARK: (first, after - first)}
        first = after
    return first


def draws(node: fx.Node) -> bool:
    """Whether a call draws: dropout [input, p, training], attention […, …, …, mask, p], or another."""
    op, args = str(node.target), node.args
    if op in DROPOUTS:
        return bool(args[1]) and args[2] is not False
    if op in RECURRENT:
        return bool(args[5])
    if op == SDPA:
        return len(args) > 4 and bool(args[4])
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and op != SDPA


def read_numbers(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """Draw of the decomposed graph → its number.

    Raises LocalError HP-MODEL-003 if one of several draws of a region without gradients leads nowhere.
    """
    numbers: dict[fx.Node, int] = {}
    seen: Counter[int] = Counter()
    marks: dict[int, int] = {}
    for node in nodes:
        if node.op == "call_function" and draws(node):
            mark: Any = node.meta.get("custom", {}).get(MARK)
            first, count = mark if mark is not None else (-1, 0)
            numbers[node] = first + seen[first]
            seen[first] += 1
            marks[first] = count
    if any(seen[first] != count for first, count in marks.items()):
        raise unfit(
            "a random draw of the model has no part in what forward() returns",
            "a draw depends on its place among all, and that of one in a torch.no_grad region is not known",
            "leave it out, or give a dropout the probability 0",
        )
    return numbers
