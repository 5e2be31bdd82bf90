"""`hetpeer trace`: a timeline of what every peer did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def trace(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Folder with traces, such as a volunteer's home.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("trace.json"),
) -> None:
    """Merge the traces of a swarm into one file.

    For ui.perfetto.dev: computing, sending and receiving of each peer, as `join --trace` has recorded them.
    """
    import json

    from hetpeer.bootstrap.run.durable_files import atomic_write
    from hetpeer.peer.watching.perfetto import perfetto

    picture = perfetto(folder)
    atomic_write(out, json.dumps(picture, separators=(",", ":")).encode())
    spans = sum(event["ph"] == "X" for event in picture["traceEvents"])
    typer.echo(
        f"{spans} spans of {picture['otherData']['peers']} peers in {out}: open it at "
        "https://ui.perfetto.dev",
        err=True,
    )
