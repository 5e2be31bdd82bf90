"""`hetpeer bootstrap`: a reliable peer of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpeer.peer.cli.options import HomeOption, MetricsOption, listening, run_loop


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bootstrap)


def bootstrap(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A run directory made by hetpeer init, or where a copy is to be."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",  # noqa: S104
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port to listen on; 0 takes a free one.")
    ] = 31330,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDR", help="Peers of the run; they give the copy if DIR is not there. Repeatable."
        ),
    ] = None,
    stand_in: Annotated[
        bool,
        typer.Option("--stand-in", help="Work on blocks that nobody else holds, until somebody does."),
    ] = False,
    keep_places: Annotated[
        bool,
        typer.Option("--keep-places", help="Never give volunteers other blocks than they have chosen."),
    ] = False,
    metrics: MetricsOption = "",
    home: HomeOption = None,
) -> None:
    """Serve a run: rendezvous, data, log and coordinator. Prints the line that volunteers type."""
    from hetpeer.dht.addresses import parse_address

    known = tuple(parse_address(text) for text in peers or ())

    from hetpeer.peer.home import Home, default_home
    from hetpeer.peer.lifecycle import run_daemon
    from hetpeer.peer.mirroring import mirror
    from hetpeer.peer.reliable import BootstrapOptions, serve_run

    if known and not (directory / "manifest.hetpeer").exists():
        run_loop(mirror(directory, known, Home(home or default_home())))

    options = BootstrapOptions(
        directory=directory,
        host=host,
        port=port,
        peers=known,
        stand_in=stand_in,
        keep_places=keep_places,
        metrics=listening(metrics),
    )
    halt = run_daemon(
        lambda leaving: serve_run(
            options, leaving, lambda address: typer.echo(f"hetpeer join --bootstrap {address}")
        )
    )
    typer.echo("stopped; start it again to go on" if halt is None else f"finished: {halt.why}", err=True)
