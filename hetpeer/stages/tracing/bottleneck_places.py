"""Places for bottlenecks (docs/links.md): the layers whose outputs cross a border between stages.

Only a tensor that crosses alone, is the result of one module's only call and gets a gradient can pass through
a bottleneck. Other borders stay as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.graph.block_spec import Batch, OperatorCall, Ref, TensorSpec
from hetpeer.stages.operators.names import BATCH_NORM, BOTTLENECK, EMBEDDING
from hetpeer.stages.tracing.operator_line import OperatorLine, Range
from hetpeer.stages.tracing.trace import OpDag

UP = f".{BOTTLENECK}.up.weight"
"""End of the name of the parameter before which a border is narrow."""
NEAR = 1 / 64
"""A border may move over this part of the FLOPs of the block behind it."""
OVER_CHANNELS = ("aten.conv", "aten.native_group_norm", "aten.group_norm", BATCH_NORM)
"""Beginnings of operators that take the second dimension for the width."""
OVER_LAST = (
    "aten.linear",
    "aten.layer_norm",
    "aten.native_layer_norm",
    "aten.mm",
    "aten.addmm",
    "aten.matmul",
)
"""Beginnings of operators that take the last dimension for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckPlace:
    """A layer of the author's whose output alone crosses a border between two stages."""

    layer: str
    """Path of the module."""
    dim: int
    """Dimension of its output that becomes narrow: 1 for images and their like, -1 otherwise."""
    width: int
    """Size of that dimension."""
    embedding: str = ""
    """Path of the embedding that gives each token a vector of that width; empty: there is none."""
    start: tuple[int, ...] = ()
    """Sizes of what can be added to every sample: a number for each channel, or for each feature of each
    position.
    """


def stage_ends(layouts: Iterable[Sequence[Range]]) -> list[int]:
    """Blocks behind which a stage of any layout ends, in order; the last block is none of them."""
    return sorted({end - 1 for layout in layouts for _, end in layout[:-1]})


def find_places(
    line: OperatorLine, pieces: Sequence[Range], ends: Collection[int]
) -> tuple[list[BottleneckPlace], list[Range], list[str]]:
    """Places behind the blocks `ends`, the pieces with these borders, and a line for each border without one.

    A border moves a little if the layer's output comes behind it, as a ReLU that follows a sum.
    """
    places, left, found = list[BottleneckPlace](), list[str](), list(pieces)
    for block in ends:
        (begin, position), (_, end) = found[block : block + 2]
        limit = NEAR * line.flops((position, end))
        near = [later for later in range(position, end) if line.flops((position, later)) <= limit]
        tried = {later: _place(line, line.crossing(later)) for later in near}
        fit = ((later, place) for later, place in tried.items() if isinstance(place, BottleneckPlace))
        later, place = next(fit, (position, None))
        if place is None:
            left.append(f"the border behind block {block} stays as it is: {tried[position]}")
        else:
            places.append(place)
            found[block : block + 2] = (begin, later), (later, end)
    return places, found, left


def _place(line: OperatorLine, crossing: Sequence[str]) -> BottleneckPlace | str:
    """The place for the tensors that cross a border, or why there is none."""
    dag = line.dag
    if len(crossing) != 1:
        return f"{len(crossing)} tensors cross it"
    value = crossing[0]
    spec = dag.at(value)
    if not isinstance(spec, TensorSpec) or spec.dtype != "float32" or not spec.grad or len(spec.shape) < 2:
        return f"{value!r} is no float32 tensor with a gradient"
    layer = _layer(dag, value)
    if not layer:
        return f"{value!r} is the result of no module that is called once"
    dim = _width_dimension(dag, value, len(spec.shape))
    embedding = _embedding(line, value) if dim == -1 else ""
    start = _start(line, value, dim)
    return BottleneckPlace(layer=layer, dim=dim, width=spec.sizes[dim], embedding=embedding, start=start)


def _start(line: OperatorLine, value: str, dim: int) -> tuple[int, ...]:
    """Sizes of what can be added to every sample."""
    spec, given = line.dag.at(value), line.dag.values[value]
    assert isinstance(spec, TensorSpec)
    assert isinstance(given, TensorSpec)
    if dim != -1:
        return (spec.sizes[dim], *[1] * (len(spec.sizes) - dim - 1))
    positions = not any(isinstance(size, Batch) for size in given.shape[1:])
    return spec.sizes[1:] if positions else spec.sizes[-1:]


def _layer(dag: OpDag, value: str) -> str:
    """The module whose last call made `value`: the outermost one of a list of layers, else the innermost."""
    order = [node.name for node in dag.nodes]
    later = {path for name in order[order.index(value) + 1 :] for path in dag.modules.get(name, ())}
    ended = [path for path in dag.modules.get(value, ()) if path not in later]
    listed = [path for path in ended if path.rpartition(".")[2].isdigit()]
    return (listed or ended[::-1] or [""])[0]


def _width_dimension(dag: OpDag, value: str, dimensions: int) -> int:
    """1 if the first operator behind `value` that mixes features takes its second dimension, else -1."""
    if dimensions == 2:
        return -1
    behind = {value}
    for node in dag.nodes:
        if behind.isdisjoint(node.references()):
            continue
        if node.op.startswith(OVER_CHANNELS):
            return 1
        if node.op.startswith(OVER_LAST):
            return -1
        behind.add(node.name)
    return -1


def _embedding(line: OperatorLine, value: str) -> str:
    """The module that looks up a vector for each token, of the sizes of `value`; of several the largest."""
    dag, given = line.dag, {*line.copied, *line.dag.inputs}
    rows: dict[str, int] = {}
    for node in dag.nodes:
        match node:
            case OperatorCall(op=op, args=(Ref(name=table), Ref(name=ids), *_)) if op == EMBEDDING:
                path = dag.parameters.get(table, "").rpartition(".")[0]
                same = dag.values[node.name] == dag.values[value]
                if same and ids in given and path in dag.modules.get(node.name, ()):
                    weight = dag.at(table)
                    rows[path] = weight.sizes[0] if isinstance(weight, TensorSpec) else 0
    return max(rows, key=lambda path: rows[path], default="")


def moved_pieces(before: OperatorLine, pieces: Sequence[Range], after: OperatorLine) -> list[Range]:
    """The same pieces of the model with bottlenecks in it: borders at a bottleneck are where it is narrow.

    `before` and `after`: the model without and with its bottlenecks. Raises `LocalError` HP-MODEL-018 if the
    bottlenecks change more of the graph than that.
    """
    own = [place for place, node in enumerate(after.nodes) if not _of_bottleneck(after.dag, node)]
    ops = [after.nodes[place].op for place in own]
    if ops != [node.op for node in before.nodes]:
        raise no_bottleneck("with a bottleneck the model is traced to other operators")
    narrow = {place for place, node in enumerate(after.nodes) if _is_up(after.dag, node)}
    edges = [0]
    for _, end in pieces[:-1]:
        inside = narrow & set(range(own[end - 1] + 1, own[end] + 1))
        edges.append(next(iter(inside), own[end]))
        if inside and len(after.crossing(edges[-1])) != 1:
            raise no_bottleneck("another tensor crosses the border beside the narrow one")
    if len(narrow) != len(narrow & set(edges)):
        raise no_bottleneck("a layer that is to get one is called at another place than its border")
    edges.append(len(after.nodes))
    return list(itertools.pairwise(edges))


def _of_bottleneck(dag: OpDag, node: OperatorCall) -> bool:
    return any(path.rpartition(".")[2] == BOTTLENECK for path in dag.modules.get(node.name, ()))


def _is_up(dag: OpDag, node: OperatorCall) -> bool:
    return any(dag.parameters.get(name, "").endswith(UP) for name in node.references())


def no_bottleneck(why: str) -> LocalError:
    """HP-MODEL-018."""
    return LocalError(
        "HP-MODEL-018",
        "no bottleneck can be put between the model's stages",
        why=why,
        fix="leave --bottleneck out, choose other --stages, or let one float32 tensor go from layer to "
        "layer, which is the result of a module",
        exit_code=ExitCode.CONFIG,
    )
