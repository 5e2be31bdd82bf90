"""Where the graph may be cut, and how blocks are shared out to stages.

Operators stand in the author's order, and a border is a place between two of them. Good borders are *narrow*: a single
tensor crosses, as between the halves of a transformer layer. The pieces between narrow borders that repeat (attention,
MLP, attention, MLP, ...) are joined to one block per repetition, and pieces of next to no weight join a neighbour.
Operators that depend on no parameter and no input (positions, masks) are not cut at all: each block gets its own copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetpeer.dht.errors import ExitCode, LocalError
from hetpeer.stages.graph.cost import activation_bytes
from hetpeer.stages.graph.spec import BlockSpec, Node, TensorSpec
from hetpeer.stages.graph.trace import OpDag

TINY = 1 / 16
"""A piece with less than this share of the heaviest one's FLOPs, and of its parameters, is not worth a border."""

Range = tuple[int, int]
"""Positions [begin, end)."""


def cut_blocks(dag: OpDag, target_blocks: int | None = None) -> list[BlockSpec]:
    """Cut the graph into blocks, in order; about one for each repeated layer unless `target_blocks` is given.

    With `target_blocks`, neighbours are joined evenly or the heaviest pieces cut where the fewest bytes cross; fewer
    blocks come back only if the graph has no more borders. Raises LocalError HP-MODEL-004 when two blocks would share
    a parameter: each block has one owner of its gradient.
    """
    if target_blocks is not None and target_blocks < 1:
        raise _too_few(f"a model cannot be cut into {target_blocks} blocks")
    line = _Line(dag)
    pieces = _merge_tiny(line, _join_repeats(line, line.narrow_pieces()))
    if target_blocks is not None and len(pieces) > target_blocks:
        grouped = _even_ranges([line.flops(piece) for piece in pieces], [1.0] * target_blocks)
        pieces = [(pieces[begin][0], pieces[end - 1][1]) for begin, end in grouped]
    elif target_blocks is not None:
        pieces = _refine(line, pieces, target_blocks)
    _check_parameters(line, pieces)
    return [_make_block(line, index, piece) for index, piece in enumerate(pieces)]


def balanced_ranges(
    blocks: Sequence[BlockSpec], stages: int, weights: Sequence[float] | None = None
) -> list[tuple[int, int]]:
    """Contiguous block ranges [begin, end), one for each stage, that make the slowest stage as fast as possible.

    A stage's time is its blocks' forward and backward FLOPs over its `weight` (relative speed, 1 by default); among
    equals the sum of squares is least, so that a bottleneck elsewhere does not leave a stage idle. Exact, by dynamic
    programming. Raises LocalError HP-MODEL-005 when there are fewer blocks than stages.
    """
    if not 1 <= stages <= len(blocks):
        raise _too_few(f"{len(blocks)} blocks cannot be shared out to {stages} stages")
    if weights is not None and len(weights) != stages:
        raise ValueError(f"{len(weights)} weights for {stages} stages")
    return _even_ranges([3 * block.flops_forward for block in blocks], weights or [1.0] * stages)


def _too_few(what: str) -> LocalError:
    fix = "ask for at least one stage and one block, and no more stages than blocks"
    return LocalError("HP-MODEL-005", what, fix=fix, exit_code=ExitCode.CONFIG)


def _even_ranges(costs: Sequence[int], weights: Sequence[float]) -> list[Range]:
    """Split `costs` into len(weights) non-empty ranges: least maximum of cost / weight, then least sum of squares."""
    sums = [0, *itertools.accumulate(costs)]

    def seconds(stage: int, begin: int, end: int) -> float:
        return (sums[end] - sums[begin]) / weights[stage]

    def best(limit: float | None) -> tuple[float, list[Range]]:
        # table[end]: the best way to share costs[:end] out to the stages so far. Without a limit "best" is the least
        # maximum, with one the least sum of squares that stays under it.
        table: dict[int, tuple[float, list[Range]]] = {0: (0.0, [])}
        for stage in range(len(weights)):
            later = len(weights) - stage - 1
            grown: dict[int, tuple[float, list[Range]]] = {}
            for end in range(stage + 1, len(costs) - later + 1):
                for begin, (score, ranges) in table.items():
                    time = seconds(stage, begin, end) if begin < end else math.inf
                    if math.isinf(time) or (limit is not None and time > limit):
                        continue
                    total = max(score, time) if limit is None else score + time * time
                    if end not in grown or total < grown[end][0]:
                        grown[end] = (total, [*ranges, (begin, end)])
            table = grown
        return table[len(costs)]

    slowest, _ = best(None)
    return best(slowest)[1]


@dataclass(frozen=True, slots=True)
class _Border:
    """What crosses between two positions; a tuple of results may not cross, so it has no border."""

    crossing: tuple[str, ...]
    nbytes: int


class _Line:
    """The operators that are cut, in order; position p is between node p - 1 and node p."""

    def __init__(self, dag: OpDag) -> None:
        self.dag = dag
        fixed = set(dag.buffers)
        for node in dag.nodes:
            if all(name in fixed for name in node.references()):
                fixed.add(node.name)
        self.copied = fixed - set(dag.buffers)
        self.nodes = [node for node in dag.nodes if node.name not in self.copied]
        self.borders = self._borders()

    def _borders(self) -> dict[int, _Border]:
        """Position -> border, for the places where a cut is possible."""
        last = {name: position for position, node in enumerate(self.nodes) for name in node.references()}
        live: dict[str, None] = {}
        borders = {}
        for position, node in enumerate(self.nodes[:-1], start=1):
            live[node.name] = None
            live = {name: None for name in live if last.get(name, 0) >= position}
            values = [self.dag.values[name] for name in live]
            tensors = [value for value in values if isinstance(value, TensorSpec)]
            if len(tensors) == len(values):
                borders[position] = _Border(tuple(live), sum(spec.nbytes for spec in tensors))
        return borders

    def narrow_pieces(self) -> list[Range]:
        """The pieces between all places where one tensor crosses."""
        cuts = [position for position, border in self.borders.items() if len(border.crossing) == 1]
        return list(itertools.pairwise([0, *cuts, len(self.nodes)]))

    def crossing(self, position: int) -> Mapping[str, TensorSpec]:
        """The bundle at a border, or nothing at the ends."""
        border = self.borders.get(position)
        return self.specs(border.crossing) if border else {}

    def bytes_at(self, position: int) -> int:
        border = self.borders.get(position)
        return border.nbytes if border else 0

    def specs(self, names: Iterable[str]) -> dict[str, TensorSpec]:
        specs = {}
        for name in names:
            value = self.dag.values[name]
            assert isinstance(value, TensorSpec)
            specs[name] = value
        return specs

    def flops(self, piece: Range) -> int:
        return sum(self.dag.flops[node.name] for node in self.nodes[slice(*piece)])

    def parameters(self, piece: Range) -> set[str]:
        """Value names of the parameters a piece reads."""
        names = {name for node in self.nodes[slice(*piece)] for name in node.references()}
        return names & self.dag.parameters.keys()

    def parameter_bytes(self, piece: Range) -> int:
        return sum(spec.nbytes for spec in self.specs(self.parameters(piece)).values())

    def signature(self, piece: Range) -> tuple[object, ...]:
        """What a piece does, names left out: equal for two layers of one kind."""
        return tuple(
            (node.op, self.dag.values[node.name], len(list(node.references())))
            for node in self.nodes[slice(*piece)]
        )


def _join_repeats(line: _Line, pieces: list[Range]) -> list[Range]:
    """Join the longest run of repeating pieces to one piece per repetition."""
    kinds = [line.signature(piece) for piece in pieces]
    longest, period, start = 0, 1, 0
    for step in range(1, len(kinds) // 2 + 1):
        same = [kinds[i] == kinds[i + step] for i in range(len(kinds) - step)]
        position = 0
        for equal, group in itertools.groupby(same):
            run = len(list(group))
            repeats = run // step + 1
            if equal and repeats > 1 and repeats * step > longest:
                longest, period, start = repeats * step, step, position
            position += run
    joined = [
        (pieces[first][0], pieces[first + period - 1][1]) for first in range(start, start + longest, period)
    ]
    return [*pieces[:start], *joined, *pieces[start + longest :]]


def _merge_tiny(line: _Line, pieces: list[Range]) -> list[Range]:
    """Join pieces that compute next to nothing with each other, then those of no weight at all with a neighbour.

    The first is for embedding tables: no FLOPs but many parameters, so together they stay a block. The second goes
    over the border that more bytes would cross (logits stay with their loss), else to the later neighbour.
    """
    flops_floor = TINY * max(line.flops(piece) for piece in pieces)
    bytes_floor = TINY * max(line.parameter_bytes(piece) for piece in pieces)
    merged: list[Range] = []
    for idle, group in itertools.groupby(pieces, key=lambda piece: line.flops(piece) < flops_floor):
        run = list(group)
        merged += [(run[0][0], run[-1][1])] if idle else run

    def tiny(piece: Range) -> bool:
        return line.flops(piece) < flops_floor and line.parameter_bytes(piece) < bytes_floor

    while (small := next((i for i, piece in enumerate(merged) if tiny(piece)), None)) is not None:
        ends = [i for i in (small, small + 1) if 0 < i < len(merged)]
        end = max(ends, key=lambda i: (line.bytes_at(merged[i][0]), i))
        merged[end - 1 : end + 1] = [(merged[end - 1][0], merged[end][1])]
    return merged


def _refine(line: _Line, pieces: list[Range], target: int) -> list[Range]:
    """Cut the heaviest piece at its cheapest border, then most evenly, until there are `target` pieces."""
    pieces = list(pieces)
    while len(pieces) < target:
        for piece in sorted(pieces, key=line.flops, reverse=True):
            inside = [position for position in range(piece[0] + 1, piece[1]) if position in line.borders]
            if inside:
                break
        else:
            break
        begin, end = piece
        cut = min(
            inside, key=lambda p: (line.bytes_at(p), abs(line.flops((begin, p)) - line.flops((p, end))))
        )
        at = pieces.index(piece)
        pieces[at : at + 1] = [(begin, cut), (cut, end)]
    return pieces


def _check_parameters(line: _Line, pieces: list[Range]) -> None:
    owner: dict[str, int] = {}
    for index, piece in enumerate(pieces):
        for name in sorted(line.parameters(piece)):
            first = owner.setdefault(name, index)
            if first != index:
                raise LocalError(
                    "HP-MODEL-004",
                    f"blocks {first} and {index} share the parameter {line.dag.parameters[name]!r}",
                    fix="untie it: give each place a parameter of its own",
                    exit_code=ExitCode.CONFIG,
                )


def _make_block(line: _Line, index: int, piece: Range) -> BlockSpec:
    dag = line.dag
    nodes = _with_copies(line, line.nodes[slice(*piece)])
    used = {name for node in nodes for name in node.references()}
    parameters = {name: fqn for name, fqn in dag.parameters.items() if name in used}
    buffers = {name: fqn for name, fqn in dag.buffers.items() if name in used}
    parameter_specs = {dag.parameters[name]: spec for name, spec in line.specs(parameters).items()}
    buffer_specs = {dag.buffers[name]: spec for name, spec in line.specs(buffers).items()}
    inputs = line.crossing(piece[0])
    data = line.specs(name for name in dag.inputs if name in used)
    last = piece[1] == len(line.nodes)
    outputs = line.specs([dag.loss]) if last else line.crossing(piece[1])
    return BlockSpec(
        index=index,
        inputs=inputs,
        outputs=outputs,
        data=data,
        nodes=nodes,
        parameters=parameters,
        parameter_specs=parameter_specs,
        buffers=buffers,
        buffer_specs=buffer_specs,
        flops_forward=sum(dag.flops[node.name] for node in nodes),
        activation_bytes=activation_bytes(
            nodes, {**inputs, **data}, line.specs((*parameters, *buffers)), outputs
        ),
        loss=dag.loss if last else None,
    )


def _with_copies(line: _Line, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes of a piece and the copied operators they need, in the author's order."""
    wanted = {node.name for node in nodes}
    for node in reversed(line.dag.nodes):
        if node.name in wanted:
            wanted.update(name for name in node.references() if name in line.copied)
    return tuple(node for node in line.dag.nodes if node.name in wanted)
