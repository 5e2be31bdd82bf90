"""SVG picture of a model's blocks and the graph inside them: no drawing library, the same bytes for the same
model.

Blocks are boxes from top to bottom, with the values that cross between them. In a box there is one row per
operator that computes, and lines for values: straight down to the next row, beside the rows to later ones. A
block that does what an earlier one does is a narrow box that says so. Values that cross whole blocks unread
are drawn past them, on the left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetpeer.peer.limits.amounts import bytes_text, count_text, flops_text
from hetpeer.peer.watching.svg_shapes import FAINT, LINE, PAPER, arrow, document, rect, short, text
from hetpeer.stages.graph.block_spec import BlockSpec, TensorSpec, Value
from hetpeer.stages.graph.graph_cost import BlockCostRow
from hetpeer.stages.tracing.outline import Outline, OutlineRow, RowKind, outline

BOX = "#f6f8fa"
SKIP, DATA = "#bc4c00", "#1a7f37"
FILLS = {"product": "#cfe4ff", "norm": "#d4f3dd", "dropout": "#eadcff", "other": "#eaeef2", "loss": "#ffd7d5"}
STAGES = ("#0969da", "#bf8700", "#8250df", "#1a7f37", "#cf222e")

MARGIN, TITLE = 24, 76
ROW, CHIP_HEIGHT, HEAD, PAD, SLIM = 24, 18, 46, 8, 40
LEFT_TEXT, CHIP, LANE, RIGHT_TEXT, GAP_LINE = 230, 140, 11, 230, 16
PAST, PAST_TEXT = 16, 170
"""Pixels between two values that pass blocks on the left, and room for their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """A block, what is in it, and where it stands; `like` is an earlier block that does the same."""

    spec: BlockSpec
    cost: BlockCostRow
    inside: Outline
    like: int | None
    top: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Horizontal positions in pixels."""

    box: float
    chip: float
    facts: float
    end: float

    @property
    def middle(self) -> float:
        return self.chip + CHIP / 2


def picture(
    specs: Sequence[BlockSpec],
    costs: Sequence[BlockCostRow],
    *,
    title: str,
    stages: Sequence[tuple[int, int]] = (),
) -> str:
    """The SVG document. `stages` are block ranges, marked on the right."""
    insides = [outline(spec, cost) for spec, cost in zip(specs, costs, strict=True)]
    skips = list(_skips(insides))
    lanes = 1 + max((lane.column for inside in insides for lane in inside.lanes), default=0)
    box = MARGIN + (PAST_TEXT + PAST * (1 + max(column for *_, column in skips)) if skips else 0)
    chip = box + PAD + LEFT_TEXT
    facts = chip + CHIP + 20 + lanes * LANE
    columns = _Columns(box=box, chip=chip, facts=facts, end=facts + RIGHT_TEXT)
    drawn = list(_place(specs, costs, insides))
    height = drawn[-1].top + drawn[-1].height + MARGIN
    width = columns.end + (60 if stages else MARGIN)
    body = [
        *_title(title, specs, costs),
        *(part for block in drawn for part in _block(block, columns)),
        *(part for block in drawn[:-1] for part in _between(block, columns)),
        *(part for skip in skips for part in _past(drawn, skip, columns)),
        *(part for number, stage in enumerate(stages) for part in _stage(drawn, number, stage, columns)),
    ]
    return document(width, height, body)


def _place(
    specs: Sequence[BlockSpec], costs: Sequence[BlockCostRow], insides: Sequence[Outline]
) -> Iterator[_Drawn]:
    """Blocks from top to bottom; a block like an earlier one is drawn without its inside."""
    top: float = TITLE
    seen: dict[object, int] = {}
    for spec, cost, inside in zip(specs, costs, insides, strict=True):
        like = seen.get(inside.shape)
        seen.setdefault(inside.shape, spec.index)
        height = SLIM if like is not None else HEAD + ROW * len(inside.rows) + PAD
        yield _Drawn(spec=spec, cost=cost, inside=inside, like=like, top=top, height=height)
        top += height + 2 * PAD + GAP_LINE * len(cost.leaves)


# ── blocks ──────────────────────────────────────────────────────────────────────────────────────────────────


def _title(title: str, specs: Sequence[BlockSpec], costs: Sequence[BlockCostRow]) -> Iterator[str]:
    """Title line and figures of the whole model."""
    parameters = {name: spec.count for block in specs for name, spec in block.parameter_specs.items()}
    forward, backward = (
        sum(getattr(cost, f"flops_{way}") for cost in costs) for way in ("forward", "backward")
    )
    facts = [
        f"{len(specs)} blocks",
        f"{count_text(sum(parameters.values()))} parameters",
        (
            f"a microbatch of {specs[0].batch} takes {flops_text(forward)} forward, {flops_text(backward)} "
            "backward"
        ),
    ]
    yield text(MARGIN, 32, title, size=16, weight="bold")
    yield text(MARGIN, 52, ", ".join(facts), fill=FAINT)


def _block(block: _Drawn, columns: _Columns) -> Iterator[str]:
    """Box of a block, with its figures and operators."""
    cost, width = block.cost, columns.end - columns.box
    yield '<g class="block">'
    yield rect(columns.box, block.top, width, block.height, fill=BOX, stroke=LINE, radius=6)
    yield text(columns.box + PAD, block.top + 17, f"block {cost.index}", size=13, weight="bold")
    first = f"{count_text(cost.parameters)} parameters, {bytes_text(cost.parameter_bytes)}"
    second = (
        f"{flops_text(cost.flops_forward)} forward, {flops_text(cost.flops_backward)} backward, "
        f"keeps {bytes_text(cost.activation_bytes)}"
    )
    yield text(columns.end - PAD, block.top + 16, first, fill=FAINT, anchor="end")
    yield text(columns.end - PAD, block.top + 31, second, fill=FAINT, anchor="end")
    operators = sum(row.kind is RowKind.OPERATOR for row in block.inside.rows)
    what = f"{operators} operator{'' if operators == 1 else 's'}"
    if block.inside.hidden:
        what += f" and {block.inside.hidden} that only rearrange (not drawn)"
    if block.like is not None:
        what = f"does what block {block.like} does, on its own parameters"
    yield text(columns.box + PAD, block.top + 33, what, fill=FAINT)
    if block.like is None:
        yield from _inside(block, columns)
    yield "</g>"


def _inside(block: _Drawn, columns: _Columns) -> Iterator[str]:
    """Operators of a block, and arrows for the values between them."""
    rows = block.inside.rows
    for number in sorted(block.inside.straight):
        value = rows[number - 1].value
        label = f"{value}, {bytes_text(rows[number].reads[number - 1])}"
        below = _middle(block, number - 1) + CHIP_HEIGHT / 2
        yield arrow(
            [(columns.middle, below), (columns.middle, _middle(block, number) - CHIP_HEIGHT / 2)], label
        )
    right = columns.chip + CHIP
    for lane in block.inside.lanes:
        x = right + 14 + LANE * lane.column
        passed = rows[lane.row + 1 : lane.readers[-1]]
        colour = SKIP if any(row.cost and row.cost.formula for row in passed) else LINE
        corner = _middle(block, lane.row) + 3
        start = [(right, corner), (x, corner)]
        for end in lane.readers:
            y = _middle(block, end) - 3
            yield arrow(
                [*start, (x, y), (right, y)],
                f"{rows[lane.row].value}, {bytes_text(lane.nbytes)}",
                colour=colour,
            )
            start = [(x, y)]
    for number, row in enumerate(rows):
        yield from _row(row, _middle(block, number), columns, loss=block.spec.loss)


def _row(row: OutlineRow, y: float, columns: _Columns, *, loss: str | None) -> Iterator[str]:
    """One operator: a chip with its name, what it reads on the left, figures on the right."""
    top = y - CHIP_HEIGHT / 2
    if row.cost is None:
        yield rect(columns.chip, top, CHIP, CHIP_HEIGHT, fill=PAPER, stroke=LINE, radius=9)
        yield text(columns.middle, y + 4, short(row.label, 20), anchor="middle", fill=FAINT)
        return
    fill = FILLS[_group(row, loss)]
    yield rect(columns.chip, top, CHIP, CHIP_HEIGHT, fill=fill, stroke=LINE, radius=4, hint=row.value)
    yield text(columns.middle, y + 4, short(row.label, 20), anchor="middle")
    if row.data or row.parameters:
        names = ", ".join(row.data) + (" → " if row.data else "") + _names(row.parameters)
        yield text(columns.chip - 6, y + 4, names, anchor="end", fill=DATA if row.data else FAINT)
    facts = _sizes(row.cost.result)
    if row.cost.formula:
        facts += f", {flops_text(row.cost.flops_forward)}"
    yield text(columns.facts, y + 4, facts, fill=FAINT)


def _group(row: OutlineRow, loss: str | None) -> str:
    if row.value == loss:
        return "loss"
    if row.cost is not None and row.cost.formula:
        return "product"
    return next((group for group in ("norm", "dropout") if group in row.label), "other")


def _between(block: _Drawn, columns: _Columns) -> Iterator[str]:
    """The bundle that leaves a block: an arrow, and each value's name and bytes."""
    begin = block.top + block.height
    length = 2 * PAD + GAP_LINE * len(block.cost.leaves)
    specs = block.spec.at(block.spec.batch).outputs
    yield arrow(
        [(columns.middle, begin), (columns.middle, begin + length)],
        bytes_text(sum(block.cost.leaves.values())),
        wide=True,
    )
    for line, (name, nbytes) in enumerate(block.cost.leaves.items()):
        label = f"{short(name, 30)}  {_sizes(specs[name])} {specs[name].dtype}, {bytes_text(nbytes)}"
        yield text(columns.middle + 14, begin + PAD + GAP_LINE * line + 12, label)


# ── values that pass blocks ─────────────────────────────────────────────────────────────────────────────────


def _skips(insides: Sequence[Outline]) -> Iterator[tuple[str, int, int, int]]:
    """(value, block it leaves, block that reads it, column) of values that pass at least one block unread."""
    found = []
    since: dict[str, int] = {}
    for number, inside in enumerate(insides):
        rows = inside.rows
        read = {rows[source].value for row in rows if row.kind is RowKind.OPERATOR for source in row.reads}
        leaving = {row.value for row in rows if row.kind is RowKind.LEAVES}
        found += [
            (name, begin, number) for name, begin in since.items() if name in read and number - begin > 1
        ]
        since = {
            name: since[name] if name in since and name not in read else number for name in sorted(leaving)
        }
    ends: list[int] = []
    for name, begin, end in sorted(found, key=lambda skip: (skip[1], skip[2])):
        column = next((c for c, last in enumerate(ends) if last <= begin), len(ends))
        ends[column : column + 1] = [end]
        yield name, begin, end, column


def _past(drawn: Sequence[_Drawn], skip: tuple[str, int, int, int], columns: _Columns) -> Iterator[str]:
    name, begin, end, column = skip
    x = columns.box - PAST * (column + 1)
    top, bottom = drawn[begin].top + drawn[begin].height - 10, drawn[end].top + 10
    nbytes = bytes_text(drawn[begin].cost.leaves[name])
    yield arrow([(columns.box, top), (x, top), (x, bottom), (columns.box, bottom)], name, colour=SKIP)
    yield text(
        x - 5, (top + bottom) / 2 + 14 * column, f"{short(name, 16)}, {nbytes}", anchor="end", fill=SKIP
    )


def _stage(drawn: Sequence[_Drawn], number: int, stage: tuple[int, int], columns: _Columns) -> Iterator[str]:
    top, last = drawn[stage[0]].top, drawn[stage[1] - 1]
    colour = STAGES[number % len(STAGES)]
    x, middle = columns.end + 12, (top + last.top + last.height) / 2
    yield rect(x, top, 6, last.top + last.height - top, fill=colour, stroke="none", radius=3)
    turned = f' transform="rotate(90 {x + 14:.1f} {middle:.1f})"'
    yield text(x + 14, middle, f"stage {number}", fill=colour, anchor="middle", more=turned)


# ── words and shapes ────────────────────────────────────────────────────────────────────────────────────────


def _middle(block: _Drawn, row: int) -> float:
    return block.top + HEAD + ROW * row + ROW / 2


def _names(parameters: Sequence[str]) -> str:
    """Names, each without the words that it shares with the first one."""
    if not parameters:
        return ""
    first, *others = parameters
    stem = first.rpartition(".")[0]
    parts = first.split(".")
    words = [".".join(parts[-3:] if len(parts) > 2 and parts[-2].isdigit() else parts[-2:])]
    words += [name.rpartition(".")[2] if name.rpartition(".")[0] == stem else name for name in others]
    return short(", ".join(words), 36)


def _sizes(value: Value) -> str:
    shapes = [part.sizes for part in ((value,) if isinstance(value, TensorSpec) else value)]
    first = f"[{', '.join(map(str, shapes[0]))}]" if shapes[0] else "a number"
    return first if len(shapes) == 1 else f"{first} and {len(shapes) - 1} more"
