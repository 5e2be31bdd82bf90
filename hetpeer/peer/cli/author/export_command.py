"""`hetpeer export` and `hetpeer generate`: the trained weights, and text from them. The work is done in
bootstrap/authoring.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpeer.peer.cli.options import RunDir


def export(
    directory: RunDir,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="File to write, such as OUT.safetensors; the loss curve goes beside it, as "
            "OUT.metrics.jsonl.",
        ),
    ],
) -> None:
    """Write the weights of the newest checkpoint.

    They have the author's parameter names.
    """
    from hetpeer.bootstrap.authoring.export import export as run_export

    exported = run_export(directory, out)
    if not exported.version:
        typer.echo("nothing is trained yet: these are the initial parameters", err=True)
    print(f"{exported.weights}: the parameters after {exported.version} of {exported.steps} committed steps")
    print(f"{exported.metrics}: {exported.steps} steps")


def generate(
    directory: RunDir,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    tokens: Annotated[int, typer.Option(min=1, help="Bytes to add to it.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Randomness; 0 always takes the likeliest byte.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Seed: the same one gives the same text.")] = 0,
) -> None:
    """Continue a text with the trained model."""
    from hetpeer.bootstrap.authoring.export import generate as run_generate

    pieces = run_generate(directory, prompt, tokens=tokens, temperature=temperature, seed=seed)
    print(prompt + b"".join(pieces).decode(errors="replace"))
