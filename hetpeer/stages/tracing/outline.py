"""A picture of a block's graph: one row for each computing operator, and lanes for values that skip rows.

Rows are in the order of the program, inputs above and outputs below. Operators that only rearrange (views,
splits) are left out: their readers are shown to read their inputs. A value that the next row reads goes
straight down; every other value runs beside the rows in a lane. Lanes are packed as narrowly as possible.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.graph.graph_cost import BlockCostRow, OperatorCost
from hetpeer.stages.operators.operators import operator_of

SHORT = {"scaled_dot_product_attention": "attention", "cross_entropy_loss": "cross_entropy"}
"""Shorter labels."""


class RowKind(enum.Enum):
    """Kinds of rows."""

    ENTERS = enum.auto()
    OPERATOR = enum.auto()
    LEAVES = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlineRow:
    """One row of the picture."""

    kind: RowKind
    value: str
    """The value that the row makes, or that enters or leaves."""
    label: str
    reads: Mapping[int, int]
    """Row above that makes a value read here → bytes."""
    parameters: tuple[str, ...] = ()
    """The author's names of parameters and buffers that it reads."""
    data: tuple[str, ...] = ()
    cost: OperatorCost | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLane:
    """A value that passes rows, in `column` 0, 1, … from the rows outwards."""

    row: int
    """The row that makes the value."""
    readers: tuple[int, ...]
    column: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A block's rows and lanes."""

    rows: tuple[OutlineRow, ...]
    lanes: tuple[ValueLane, ...]
    straight: frozenset[int]
    """Rows that read the row just above them."""
    hidden: int
    """Number of operators left out because they only rearrange."""

    @property
    def shape(self) -> tuple[object, ...]:
        """The block's operators without names: equal for two layers of one kind."""
        return tuple(
            (row.kind, tuple(row.reads.items()), row.cost and (row.cost.op, row.cost.result))
            for row in self.rows
        )


def outline(spec: BlockSpec, cost: BlockCostRow) -> Outline:
    """The rows and lanes of a block with its costs."""
    owned = {**spec.parameters, **spec.buffers, **spec.statistics}
    rows = [OutlineRow(kind=RowKind.ENTERS, value=name, label=name, reads={}) for name in spec.inputs]
    made = {row.value: number for number, row in enumerate(rows)}
    from_moves: dict[str, list[str]] = {}
    """Value of an operator that is left out → what it read."""
    for node, operator in zip(spec.nodes, cost.operators, strict=True):
        read = list(dict.fromkeys(node.references()))
        sources = [source for name in read for source in from_moves.get(name, [name])]
        if operator_of(operator.op).moves:
            from_moves[operator.name] = sources
            continue
        made[operator.name] = len(rows)
        rows.append(
            OutlineRow(
                kind=RowKind.OPERATOR,
                value=operator.name,
                label=operator_label(operator.op),
                reads=_reads(read, from_moves, made, operator.reads),
                parameters=tuple(dict.fromkeys(owned[name] for name in sources if name in owned)),
                data=tuple(dict.fromkeys(name for name in sources if name in spec.data)),
                cost=operator,
            )
        )
    for name, nbytes in cost.leaves.items():
        reads = _reads([name], from_moves, made, {name: nbytes})
        rows.append(OutlineRow(kind=RowKind.LEAVES, value=name, label=name, reads=reads))
    return Outline(
        rows=tuple(rows),
        lanes=tuple(_lanes(rows)),
        straight=frozenset(number for number, row in enumerate(rows) if number - 1 in row.reads),
        hidden=len(from_moves),
    )


def operator_label(op: str) -> str:
    """`aten.native_layer_norm.default` → `layer_norm`."""
    name = op.split(".")[1] if "." in op else op
    name = re.sub("^_*(native_)?", "", name)
    return SHORT.get(name, name)


def _reads(
    read: Sequence[str],
    from_moves: Mapping[str, Sequence[str]],
    made: Mapping[str, int],
    nbytes: Mapping[str, int],
) -> dict[int, int]:
    """Rows that are read → bytes as they arrive; several parts of one row are added up."""
    found: dict[int, int] = {}
    for name in read:
        for source in dict.fromkeys(from_moves.get(name, [name])):
            if source in made:
                found[made[source]] = found.get(made[source], 0) + nbytes.get(name, 0)
    return found


def _lanes(rows: Sequence[OutlineRow]) -> list[ValueLane]:
    """A lane for each row read by others than the next; short ones are innermost, none overlap."""
    readers: dict[int, list[tuple[int, int]]] = {}
    for number, row in enumerate(rows):
        for source, nbytes in row.reads.items():
            if source != number - 1:
                readers.setdefault(source, []).append((number, nbytes))
    lanes: list[ValueLane] = []
    for source, reading in sorted(readers.items(), key=lambda item: (item[1][-1][0] - item[0], item[0])):
        last = reading[-1][0]
        taken = {lane.column for lane in lanes if lane.row < last and source < lane.readers[-1]}
        column = next(column for column in range(len(lanes) + 1) if column not in taken)
        ends = tuple(number for number, _ in reading)
        lanes.append(
            ValueLane(row=source, readers=ends, column=column, nbytes=max(size for _, size in reading))
        )
    return lanes
