"""`hetpeer export`: the trained weights. The work is done in bootstrap/results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetpeer.bootstrap.pretrained.formats import Dtype, Format
from hetpeer.peer.cli.options import RunDir

if TYPE_CHECKING:
    from hetpeer.bootstrap.results.export import ExportedWeights


def export(
    directory: RunDir,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="Folder to make, or file to write, such as OUT.safetensors; the loss curve goes into the "
            "folder, or beside the file as OUT.metrics.jsonl.",
        ),
    ],
    *,
    form: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="hf: a folder that from_pretrained loads; adapter: one with the adapters alone, that peft "
            "loads; safetensors: one file (default: hf for a model of transformers, unless OUT ends with "
            ".safetensors or the run has bottlenecks).",
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights.")] = Dtype.FLOAT32,
    every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Stay while the run is served, and export the first checkpoint of each N updates, to "
            "OUT/checkpoint-UPDATES.",
        ),
    ] = None,
    best: Annotated[
        bool,
        typer.Option("--best", help="Take the checkpoint with the lowest held-out loss instead."),
    ] = False,
) -> None:
    """Write the weights of the newest checkpoint.

    They have their original names. A folder has the tokenizer and a model card, too. The run may be going on.
    """
    from hetpeer.bootstrap.results.export import export as run_export
    from hetpeer.bootstrap.results.follow_run import checkpoints

    if every is None:
        _tell(run_export(directory, out, form, dtype, best=best))
        return
    for _ in checkpoints(directory, every):
        _tell(run_export(directory, out, form, dtype, numbered=True, best=best))


def _tell(exported: ExportedWeights) -> None:
    """Say what was written."""
    if not exported.version:
        typer.echo("nothing is trained yet: these are the initial parameters", err=True)
    print(f"{exported.weights}: the parameters after {exported.version} of {exported.steps} committed steps")
    print(f"{exported.metrics}: {exported.steps} steps")
    if exported.part:
        print(f"names are those of the model of transformers in your module, without '{exported.part}.'")
    if exported.left_out:
        print(f"not in the folder: {', '.join(exported.left_out)} (--format safetensors has them)")
