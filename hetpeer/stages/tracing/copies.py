"""Values that each block computes for itself, so that they never cross a border.

Masks and tables of positions are read by all layers. They depend on the samples' arrays, constants and
buffers alone, which every volunteer has, and computing them takes next to nothing. If they crossed, no border
within the layers would be narrow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hetpeer.stages.graph.graph_cost import value_bytes
from hetpeer.stages.operators.operators import operator_of
from hetpeer.stages.tracing.trace import OpDag

FLOPS_SHARE = 1 / 16
"""A value that depends on samples is computed anew if all its readers could do so for this part of the
model's FLOPs."""
BYTES_SHARE, FEW_BYTES = 1 / 256, 1 << 20
"""And if the buffers behind it take at most this part of the model's bytes, or this many."""


def copied_values(dag: OpDag) -> frozenset[str]:
    """Names of the results that each block computes anew if it reads them.

    Those of constants and buffers alone always are; those of a sample's arrays if they are cheap.
    """
    flops_limit = FLOPS_SHARE * sum(dag.flops.values())
    owned = sum(value_bytes(dag.at(name)) for name in (*dag.parameters, *dag.buffers))
    bytes_limit = max(FEW_BYTES, BYTES_SHARE * owned)
    readers = _outside_readers(dag)
    behind = {name: frozenset((name,)) for name in (*dag.buffers, *dag.inputs)}
    """Value → all that it takes: calls, buffers and inputs."""
    for node in dag.nodes:
        sources = list(node.references())
        if operator_of(node.op).in_pass or any(name not in behind for name in sources):
            continue
        needs = frozenset((node.name,)).union(*(behind[name] for name in sources))
        flops = sum(dag.flops.get(name, 0) for name in needs) * max(readers[node.name], 1)
        held = sum(value_bytes(dag.at(name)) for name in needs if name in dag.buffers)
        if needs.isdisjoint(dag.inputs) or (flops <= flops_limit and held <= bytes_limit):
            behind[node.name] = needs
    return frozenset(behind) - dag.buffers.keys() - set(dag.inputs)


def why_not_copied(dag: OpDag, name: str) -> str:
    """Why blocks cannot compute a value anew: the parameter or the draw behind it, or its cost."""
    calls = {node.name: node for node in dag.nodes}
    behind, waiting = {name}, [name]
    for value in waiting:  # it grows: the nearest come first
        if value in dag.parameters:
            return f"it depends on the parameter {dag.parameters[value]!r}"
        if node := calls.get(value):
            fresh = [source for source in dict.fromkeys(node.references()) if source not in behind]
            behind.update(fresh)
            waiting += fresh
    if any(name in behind and operator_of(node.op).in_pass for name, node in calls.items()):
        return "it depends on random numbers or a BatchNorm"
    share = sum(dag.flops.get(one, 0) for one in behind) / max(sum(dag.flops.values()), 1)
    return f"computing it takes {share:.0%} of the model's FLOPs"


def _outside_readers(dag: OpDag) -> Mapping[str, int]:
    """Value → calls that read it and depend on a parameter or a draw."""
    given = {*dag.buffers, *dag.inputs}
    readers: Counter[str] = Counter()
    for node in dag.nodes:
        sources = set(node.references())
        if not operator_of(node.op).in_pass and sources <= given:
            given.add(node.name)
        else:
            readers.update(sources)
    return readers
