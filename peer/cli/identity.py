"""`hetpeer id`: who this machine is to others."""

from __future__ import annotations

from typing import Annotated

import typer

from hetpeer.peer.cli.options import HomeOption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("id")(show)


def show(
    *,
    reliable: Annotated[
        bool,
        typer.Option("--reliable", help="Of a reliable peer: what the run's author gives to hetpeer init."),
    ] = False,
    home: HomeOption = None,
) -> None:
    """Print this peer's id; the key behind it is made at the first call and never leaves the machine."""
    from hetpeer.peer.home import Home, default_home

    place = Home(home or default_home())
    typer.echo((place.reliable_identity() if reliable else place.identity()).peer_id)
