"""`hetpeer service`: a volunteer that systemd starts at login."""

from __future__ import annotations

from typing import Annotated

import typer

from hetpeer.peer.cli import join
from hetpeer.peer.cli.options import HomeOption, check, standing_here

commands = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(commands, name="service", help="Have systemd start a volunteer at login (user service).")


@commands.command(context_settings={"ignore_unknown_options": True})
def install(
    *,
    options: Annotated[
        list[str],
        typer.Argument(metavar="OPTION...", help="As of `hetpeer join`: --bootstrap ADDR and so on."),
    ],
    home: HomeOption = None,
) -> None:
    """Start a volunteer now and at each login, with the options of `hetpeer join`. Replaces the one before."""
    from hetpeer.peer.children import COMMAND
    from hetpeer.peer.daemon import systemd
    from hetpeer.peer.home import default_home

    where = (home or default_home()).absolute()
    arguments = ["--home", str(where), *options]
    check(join.register, "join", arguments)  # now, and not in a log
    systemd.install([*COMMAND, "join", *arguments])
    typer.echo(f"installed {systemd.unit_path()}")
    if not systemd.lingers():
        typer.echo("it stops when you log out; to keep it: loginctl enable-linger", err=True)


@commands.command()
def uninstall() -> None:
    """Stop the volunteer, and start it no more. Its home stays."""
    from hetpeer.peer.daemon import systemd

    systemd.uninstall()
    typer.echo("uninstalled")


@commands.command()
def status() -> None:
    """What systemd says of it, and the link to its dashboard."""
    from hetpeer.peer.daemon import systemd

    said = systemd.properties()
    doing = f": {said['StatusText']}" if said.get("StatusText") else ""
    typer.echo(f"{said.get('ActiveState', '')} ({said.get('SubState', '')}){doing}")
    typer.echo(f"{said.get('UnitFileState', '')} {systemd.unit_path()}")
    here = standing_here(systemd.home())
    if here is not None and here.dashboard is not None:
        typer.echo(f"dashboard at {here.dashboard}")
