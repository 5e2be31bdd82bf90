"""Limits on the operator calls of a graph: an unrolled loop is named, not traced for hours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._ops import OpOverload

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.graph.structure_check import DEFAULT_LIMITS, GraphLimits
from hetpeer.stages.tracing.rewrite import author_line

SIZES = frozenset({torch.ops.aten.sym_size.int, torch.ops.aten.sym_size.default})
MOST_CALLS = 50_000
"""Calls of one microbatch's forward pass. Tracing so many takes minutes; 100 layers of a transformer are
about 6,000."""


@contextmanager
def bounded_graphs() -> Iterator[None]:
    """Stop a trace whose graph has more than MOST_CALLS calls: LocalError HP-MODEL-016."""
    graphs: Any = fx.Graph
    create = graphs.create_node
    calls_of: WeakKeyDictionary[fx.Graph, int] = WeakKeyDictionary()

    def counted(graph: fx.Graph, op: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        # Calls about sizes are no operators of a block.
        calls_of[graph] = calls_of.get(graph, 0) + (isinstance(target, OpOverload) and target not in SIZES)
        if calls_of[graph] > MOST_CALLS:
            lines = Counter(author_line(node) for node in graph.nodes)
            line, calls = lines.most_common(1)[0]
            why = f"{calls} of them are at {line}" if line else "a loop in Python is unrolled"
            raise _too_large(f"the model makes more than {MOST_CALLS} operator calls for a microbatch", why)
        made: fx.Node = create(graph, op, target, *args, **kwargs)
        return made

    graphs.create_node = counted
    try:
        yield
    finally:
        graphs.create_node = create


def check_block_sizes(specs: Sequence[BlockSpec], limits: GraphLimits = DEFAULT_LIMITS) -> None:
    """Raise LocalError HP-MODEL-016 if volunteers would refuse a block for its size."""
    for spec in specs:
        size, calls = len(pack_block(spec)), len(spec.nodes)
        if size > limits.packed_bytes or calls > limits.items:
            raise _too_large(
                f"block {spec.index} of {len(specs)} has {calls} operator calls in {size} bytes",
                f"a block has at most {limits.items} calls in {limits.packed_bytes} bytes",
            )


def _too_large(what: str, why: str) -> LocalError:
    fix = (
        "take shorter samples, or replace a loop over time by torch's associative_scan or by fewer operators"
    )
    return LocalError("HP-MODEL-016", what, why=why, fix=fix, exit_code=ExitCode.CONFIG)
