"""What keeps layers together in one block: the value that they share, and the line that makes it."""

from __future__ import annotations

from collections import Counter

from hetpeer.stages.graph.graph_cost import value_bytes
from hetpeer.stages.tracing.copies import why_not_copied
from hetpeer.stages.tracing.operator_line import OperatorLine, Range


def why_together(line: OperatorLine, piece: Range) -> str:
    """The value that passes most places inside a piece, the line that makes it, and the layers that read it.

    Of a piece that is a single operator, that operator.
    """
    begin, end = piece
    crossed = Counter(name for position in range(begin + 1, end) for name in line.live[position])
    if not crossed:
        node = line.nodes[begin]
        return f"{_named(line.layers(piece))} is one operator, {node.op} at {_made(line, node.name)}"
    shared = max(crossed, key=lambda name: (crossed[name], value_bytes(line.dag.at(name))))
    layers = line.layers(_reading(line, piece, shared)) or line.layers(piece)
    reason = why_not_copied(line.dag, shared)
    where = f"{shared!r}, made at {_made(line, shared)}, is used by {_named(layers)}"
    return f"{where}, and no block can compute it anew: {reason}"


def _reading(line: OperatorLine, piece: Range, value: str) -> Range:
    """The part of a piece that reads a value, from the layer of its first reader on."""
    places = range(*piece)
    readers = [place for place in places if value in line.nodes[place].references()]
    if not readers:
        return piece
    first = readers[0]
    while first > piece[0] and line.nodes[first - 1].name != value and not line.layers((first, first + 1)):
        first -= 1
    return first, readers[-1] + 1


def _named(layers: list[str]) -> str:
    """The layers in words: the first and the last of many."""
    if len(layers) < 2:
        return layers[0] if layers else "a part without parameters"
    return f"{layers[0]} {'and' if len(layers) == 2 else 'to'} {layers[-1]}"


def _made(line: OperatorLine, name: str) -> str:
    return line.dag.lines.get(name) or "an unknown line"
