"""The operators of a graph in the author's order, what crosses between them, and what keeps them together."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass, replace

from hetpeer.stages.graph.block_spec import TensorSpec, Value
from hetpeer.stages.graph.graph_cost import value_bytes
from hetpeer.stages.tracing.assemble import tensor_specs
from hetpeer.stages.tracing.copies import copied_values, why_not_copied
from hetpeer.stages.tracing.trace import OpDag

Range = tuple[int, int]
"""Positions [begin, end)."""


@dataclass(frozen=True, slots=True)
class Border:
    """Values that cross between two positions. A tuple of results may not cross, so it has no border."""

    values: tuple[str, ...]
    nbytes: int


class OperatorLine:
    """The operators to be cut, in order; position p is between node p - 1 and node p.

    Operators that each block copies (copies.py) are not among them.
    """

    def __init__(self, dag: OpDag) -> None:
        self.dag = dag
        self.copied = copied_values(dag)
        self.nodes = [node for node in dag.nodes if node.name not in self.copied]
        self._flops_before = [0, *itertools.accumulate(dag.flops[node.name] for node in self.nodes)]
        self.live: dict[int, tuple[str, ...]] = {}
        """Position → values made before it and read after it; none at the ends."""
        self.borders: dict[int, Border] = {}
        """Position → border, for the places where a cut is possible."""
        self._find_borders()

    def _find_borders(self) -> None:
        last = {name: position for position, node in enumerate(self.nodes) for name in node.references()}
        live: dict[str, None] = {}
        for position, node in enumerate(self.nodes[:-1], start=1):
            live[node.name] = None
            live = {name: None for name in live if last.get(name, 0) >= position}
            self.live[position] = tuple(live)
            values = [self.dag.at(name) for name in live]
            tensors = [value for value in values if isinstance(value, TensorSpec)]
            if len(tensors) == len(values):
                self.borders[position] = Border(tuple(live), sum(spec.nbytes for spec in tensors))

    @property
    def whole(self) -> Range:
        """All positions."""
        return 0, len(self.nodes)

    def narrow_pieces(self) -> list[Range]:
        """The pieces between all places where one tensor crosses."""
        cuts = [position for position, border in self.borders.items() if len(border.values) == 1]
        return list(itertools.pairwise([0, *cuts, len(self.nodes)]))

    def crossing(self, position: int) -> tuple[str, ...]:
        """Names of the values in the bundle at a border; none at the ends."""
        border = self.borders.get(position)
        return border.values if border else ()

    def bytes_at(self, position: int) -> int:
        """Bytes of the bundle at a border, for a full microbatch; 0 at the ends."""
        border = self.borders.get(position)
        return border.nbytes if border else 0

    def flops(self, piece: Range) -> int:
        """Forward FLOPs of a full microbatch."""
        begin, end = piece
        return self._flops_before[end] - self._flops_before[begin]

    def parameters(self, piece: Range) -> set[str]:
        """Value names of the parameters that a piece reads."""
        names = {name for node in self.nodes[slice(*piece)] for name in node.references()}
        return names & self.dag.parameters.keys()

    def parameter_bytes(self, piece: Range) -> int:
        """Bytes of the parameters that a piece reads."""
        return sum(spec.nbytes for spec in tensor_specs(self.dag, self.parameters(piece)).values())

    def layers(self, piece: Range) -> list[str]:
        """Names of the author's layers whose parameters or buffers a piece reads, in order."""
        owned = {**self.dag.parameters, **self.dag.buffers, **self.dag.statistics}
        read = (name for node in self.nodes[slice(*piece)] for name in node.references())
        return list(dict.fromkeys(layer_of(owned[name]) for name in read if name in owned))

    def signature(self, piece: Range) -> tuple[object, ...]:
        """The operators of a piece without names: equal for two layers of one kind.

        What needs a gradient does not matter: nothing does in front of the first adapter.
        """
        return tuple(
            (node.op, _without_grad(self.dag.values[node.name]), len(list(node.references())))
            for node in self.nodes[slice(*piece)]
        )


def _without_grad(value: Value) -> Value:
    """A value's spec without its flags of gradients."""
    if isinstance(value, TensorSpec):
        return replace(value, grad=False)
    return tuple(replace(part, grad=False) for part in value)


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number ("h.3"), else without its last part.

    Those of a recurrent stack are told apart: "lstm.weight_ih_l2" is of "lstm.l2".
    """
    if stacked := re.fullmatch(r"(.*\.)?(?:weight|bias)_[a-z]+_(l\d+)(?:_reverse)?", name):
        return f"{stacked[1] or ''}{stacked[2]}"
    numbered = re.match(r"(.*?\.)?\d+(?=\.|$)", name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


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
