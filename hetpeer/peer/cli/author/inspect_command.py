"""`hetpeer inspect`: settings of a run, and cost of its model, or of a model that is no run yet, by block and
stage.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpeer.peer.cli.author.init_choices import BottleneckOption, LoraOption, TaskOption
from hetpeer.peer.cli.author.settings_text import settings_lines
from hetpeer.peer.cli.options import JsonOption, plain
from hetpeer.peer.limits.amounts import block_range, bytes_text, count_text, counted, flops_text
from hetpeer.stages.block.offload import Offload

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hetpeer.bootstrap.authoring.model_costs import ModelCosts
    from hetpeer.bootstrap.run.manifest import Manifest
    from hetpeer.stages.graph.graph_cost import OperatorCost
    from hetpeer.stages.worker.memory_footprint import StageMemory

BLOCK_HEADS = ("block", "ops", "params", "bytes", "forward", "backward", "keeps", "sends", "data", "tied")
STAGE_HEADS = (
    "stage",
    "blocks",
    "FLOPs",
    "sends",
    "state",
    "optimizer",
    "slots",
    "sums",
    "flight",
    "waiting",
    "working",
    "peak",
)
MEMORY_HEADS = ("stage", "offload", "GPU", "main memory", "disk", "processor", "its disk")
"""A stage with each kind of offload: on a GPU, and on a processor, where everything is main memory."""
OPERATOR_HEADS = ("operator", "value", "forward", "backward", "parameters", "keeps", "reads")


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="DIR | MODULE.PY:FUNCTION | hf:FOLDER_OR_ID",
            help="A run directory, a function that returns a model, or a model of transformers.",
        ),
    ],
    *,
    task: TaskOption = None,
    microbatch_size: Annotated[
        int,
        typer.Option(
            "--microbatch-size",
            "--batch-size",
            min=1,
            help="For a model: samples that are computed at once.",
        ),
    ] = 8,
    sequence_length: Annotated[int, typer.Option(min=1, help="For a model: tokens of one sample.")] = 64,
    stages: Annotated[
        list[int] | None,
        typer.Option(metavar="K", help="For a model: stages of a pipeline, repeatable (default: 2)."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(metavar="MODULE.PY:FUNCTION", help="For a model: as in hetpeer init."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="For a model: as in hetpeer init.")] = "float32",
    lora: LoraOption = None,
    bottleneck: BottleneckOption = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="For a model: as in hetpeer init.")] = False,
    block: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Show the operators of this block.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the graph as a picture.")] = None,
    graph: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the operator graph as GraphML, for other programs."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a run's settings and the cost of its model.

    Blocks, stages and their memory. MODULE.PY:FUNCTION and hf:… show the cost of a model that is no run yet.
    Nothing is trained, and no weights are needed.
    """
    from hetpeer.bootstrap.authoring.model_costs import inspect_run, plan_model

    if not Path(target).is_dir() and (":" in target or target.endswith(".py")):
        from hetpeer.bootstrap.run.manifest import validated
        from hetpeer.bootstrap.run.settings import TrainingSettings

        settings = validated(TrainingSettings, {"dtype": dtype, "recompute": recompute})
        found = plan_model(
            target,
            task=task,
            batch=microbatch_size,
            sequence_length=sequence_length,
            loss=loss,
            lora=lora,
            bottleneck=bottleneck,
            stages=stages or (),
            training=settings,
        )
    else:
        found = inspect_run(Path(target))
    if block is not None and block >= len(found.costs):
        raise typer.BadParameter(f"there are {len(found.costs)} blocks, from 0", param_hint="--block")
    if svg is not None:
        _draw(found, svg)
    if graph is not None:
        _write_graph(found, graph)
    if as_json:
        print(json.dumps(document(found)))
    elif plain(sys.stdout):
        print("\n".join(_lines(found, block)))
    else:
        from rich.console import Console

        Console().print(_tables(found, block))


def _draw(found: ModelCosts, path: Path) -> None:
    from hetpeer.bootstrap.run.durable_files import atomic_write
    from hetpeer.peer.watching.graph_picture import picture

    stages = [(stage.begin, stage.end) for stage in found.layouts[0]]
    drawn = picture(found.specs, found.costs, title=found.name, stages=stages)
    atomic_write(path, drawn.encode())


def _write_graph(found: ModelCosts, path: Path) -> None:
    from hetpeer.bootstrap.run.durable_files import atomic_write
    from hetpeer.peer.watching.operator_graph import graphml

    atomic_write(path, graphml(found.costs).encode())


# ── one JSON object ─────────────────────────────────────────────────────────────────────────────────────────


def document(found: ModelCosts) -> dict[str, Any]:
    """The whole inspection in bytes, and FLOPs of a full microbatch. `settings`: null if it is no run."""
    return {
        "schema": "hetpeer.inspect/1",
        "name": found.name,
        "run": found.run_id or None,
        "settings": None if found.manifest is None else _settings_document(found.manifest),
        "microbatch_size": found.batch,
        "parameters": found.parameters,
        "tied": found.tied,
        "blocks": [
            {
                "index": cost.index,
                "parameters": cost.parameters,
                "parameter_bytes": cost.parameter_bytes,
                "flops_forward": cost.flops_forward,
                "flops_backward": cost.flops_backward,
                "activation_bytes": cost.activation_bytes,
                "enters": cost.enters,
                "leaves": cost.leaves,
                "data": cost.data,
                "tied": _tied(found, cost.index),
                "operators": [_operator_document(operator) for operator in cost.operators],
            }
            for cost in found.costs
        ],
        "layouts": [
            [{**asdict(stage), "memory": _memory_document(stage.memory)} for stage in layout]
            for layout in found.layouts
        ],
    }


def _memory_document(memory: StageMemory) -> dict[str, Any]:
    """Bytes by purpose, and by kind of offload of a GPU and of a processor."""
    own = {name: amount for name, amount in asdict(memory).items() if name != "demand"}
    rooms = {
        device: {kind.value: asdict(memory.demand.room(kind, apart=device == "gpu")) for kind in Offload}
        for device in ("gpu", "processor")
    }
    return {**own, "total": memory.total, "offload": rooms}


def _settings_document(manifest: Manifest) -> dict[str, Any]:
    parts = {"seed", "training", "links", "averaging", "admission", "trust"}
    return manifest.model_dump(mode="json", include=parts)


def _operator_document(operator: OperatorCost) -> dict[str, Any]:
    names = ("name", "op", "flops_forward", "flops_backward", "parameter_bytes", "kept_bytes", "reads")
    return {name: getattr(operator, name) for name in names}


# ── words ───────────────────────────────────────────────────────────────────────────────────────────────────


def _summary(found: ModelCosts, *, settings: bool) -> Iterator[tuple[str, str]]:
    """The first lines, as (label, text): the model, and with `settings` those of its run."""
    forward, backward = (
        sum(getattr(cost, f"flops_{way}") for cost in found.costs) for way in ("forward", "backward")
    )
    yield ("run", f"{found.name}  {found.run_id}") if found.run_id else ("model", found.name)
    yield "size", f"{counted(len(found.costs), 'block')}, {count_text(found.parameters)} parameters"
    samples = counted(found.batch, "sample")
    yield "microbatch", f"{samples}, {flops_text(forward)} forward, {flops_text(backward)} backward"
    for name, blocks in found.tied.items():
        yield "tied", f"{name} in blocks {', '.join(map(str, blocks))}"
    if settings and found.manifest is not None:
        yield from settings_lines(found.manifest)


def _tied(found: ModelCosts, block: int) -> list[str]:
    return [name for name, blocks in found.tied.items() if block in blocks]


def _block_cells(found: ModelCosts) -> Iterator[Sequence[str]]:
    """Rows of the table of blocks."""
    for cost in found.costs:
        yield (
            str(cost.index),
            str(len(cost.operators)),
            count_text(cost.parameters),
            bytes_text(cost.parameter_bytes),
            flops_text(cost.flops_forward),
            flops_text(cost.flops_backward),
            bytes_text(cost.activation_bytes),
            bytes_text(sum(cost.leaves.values())),
            ", ".join(cost.data),
            ", ".join(_tied(found, cost.index)),
        )


def _stage_cells(found: ModelCosts) -> Iterator[Sequence[str]]:
    """Rows of the table of stages, layout by layout."""
    for number, layout in enumerate(found.layouts):
        whole = sum(stage.flops_forward + stage.flops_backward for stage in layout)
        for place, stage in enumerate(layout):
            memory = stage.memory
            share = (stage.flops_forward + stage.flops_backward) / max(whole, 1)
            yield (
                _stage_name(found, number, place),
                block_range(stage.begin, stage.end),
                f"{share:.0%}",
                bytes_text(sum(stage.leaves.values())),
                *map(bytes_text, (memory.state, memory.optimizer, memory.slots, memory.sums)),
                str(memory.in_flight),
                *map(bytes_text, (memory.waiting, memory.working, memory.total)),
            )


def _memory_cells(found: ModelCosts) -> Iterator[Sequence[str]]:
    """Rows of the table of stages by kind of offload."""
    for number, layout in enumerate(found.layouts):
        for place, stage in enumerate(layout):
            for kind in Offload:
                gpu, processor = (stage.memory.demand.room(kind, apart=apart) for apart in (True, False))
                yield (
                    _stage_name(found, number, place),
                    kind.value,
                    *map(bytes_text, (gpu.device, gpu.host, gpu.disk)),
                    *(
                        "" if kind is Offload.HOST else bytes_text(one)
                        for one in (processor.device, processor.disk)
                    ),
                )


def _stage_name(found: ModelCosts, layout: int, place: int) -> str:
    return f"{layout}.{place}" if len(found.layouts) > 1 else str(place)


def _operator_cells(found: ModelCosts, block: int) -> Iterator[Sequence[str]]:
    """Rows of the table of operators of `block`."""
    for operator in found.costs[block].operators:
        yield (
            operator.op,
            operator.name,
            flops_text(operator.flops_forward),
            flops_text(operator.flops_backward),
            bytes_text(operator.parameter_bytes),
            bytes_text(operator.kept_bytes),
            ", ".join(f"{name} {bytes_text(nbytes)}" for name, nbytes in operator.reads.items()),
        )


def _lines(found: ModelCosts, block: int | None) -> Iterator[str]:
    """Plain text, one block, stage or operator a line, each figure with its name."""
    for label, text in _summary(found, settings=block is None):
        yield f"{label:<12}{text}"
    for what, heads, rows in _parts(found, block):
        for row in rows:
            cells = [f"{head} {cell}" for head, cell in zip(heads[1:], row[1:], strict=True) if cell]
            yield f"{what:<12}{row[0]}  " + "  ".join(cells)


def _tables(found: ModelCosts, block: int | None) -> RenderableType:
    """The same for a terminal. Cells are Text, so that no name of the author's is read as markup."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    summary = Table.grid(padding=(0, 2))
    for label, text in _summary(found, settings=block is None):
        summary.add_row(Text(label, style="bold"), Text(text))
    tables: list[RenderableType] = [summary]
    for _, heads, rows in _parts(found, block):
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        for head in heads:
            words = head in ("data", "tied", "operator", "value", "reads", "blocks")
            table.add_column(head, justify="left" if words else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        tables += ["", table]
    return Group(*tables)


def _parts(
    found: ModelCosts, block: int | None
) -> Iterator[tuple[str, Sequence[str], Iterator[Sequence[str]]]]:
    """(what a row is, column heads, rows) of each table."""
    if block is not None:
        yield "operator", OPERATOR_HEADS, _operator_cells(found, block)
        return
    yield "block", BLOCK_HEADS, _block_cells(found)
    yield "stage", STAGE_HEADS, _stage_cells(found)
    yield "memory", MEMORY_HEADS, _memory_cells(found)
