"""`hetpeer service`: have systemd start a volunteer or a reliable peer at login."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetpeer.peer.cli.options import HomeOption, check, standing_here
from hetpeer.peer.cli.swarm.bootstrap_command import bootstrap
from hetpeer.peer.cli.volunteer.join_command import join

if TYPE_CHECKING:
    from hetpeer.peer.daemon.systemd_units import Unit

commands = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Have systemd start hetpeer at login (user service)."
)
Folder = Annotated[
    Path | None,
    typer.Argument(
        metavar="DIR",
        show_default=False,
        help="Run directory of the reliable peer, or the folder of a rendezvous that install printed. "
        "Without: the volunteer.",
    ),
]


@commands.command(context_settings={"ignore_unknown_options": True})
def install(
    *,
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPTION]...",
            show_default=False,
            help="Options of `hetpeer join`, such as an invite; or `bootstrap DIR ...` with options of "
            "`hetpeer bootstrap`.",
        ),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Start a volunteer now and at each login.

    Takes options of `hetpeer join`; or `bootstrap DIR ...`, for a reliable peer. Replaces a service that was
    installed before.
    """
    from hetpeer.peer.daemon import systemd_units
    from hetpeer.peer.limits.config_file import config_path
    from hetpeer.peer.limits.setting_layers import of_environment
    from hetpeer.peer.process.hetpeer_children import COMMAND
    from hetpeer.peer.process.home import Home, default_home

    where = (home or default_home()).absolute()
    place = ("--home", str(where))
    given = options or []
    if given[:1] == ["bootstrap"]:
        words = [*place, *given[1:]]
        directory = check(bootstrap, words)["directory"]  # now, and not in a log
        words = [str(Path(word).absolute()) if Path(word) == directory else word for word in words]
        folder = Home(where).rendezvous if directory is None else directory
        unit = systemd_units.writable(systemd_units.serving(folder), [where])
        _install([*COMMAND, "bootstrap", *words], unit)
        typer.echo(f"to see its state: hetpeer status --home {folder.absolute()}")
        return
    words = [*place, *given]
    check(join, words)
    for layer in of_environment(os.environ):
        typer.echo(
            f"{layer.source} is set in this shell only; for the service use hetpeer config set", err=True
        )
    runs = standing_here(where) is not None and not systemd_units.is_active(systemd_units.VOLUNTEER)
    settings = config_path(where).parent
    settings.mkdir(parents=True, exist_ok=True)  # systemd lets the service write there only if it exists
    unit = systemd_units.writable(systemd_units.VOLUNTEER, [where, settings])
    _install([*COMMAND, "join", *words], unit)
    if runs:
        typer.echo(
            f"a volunteer already runs from {where}: end it with `hetpeer stop`, and the service starts "
            "within half a minute",
            err=True,
        )


def _install(command: Sequence[str], unit: Unit) -> None:
    from hetpeer.peer.daemon import systemd_units

    systemd_units.install(command, unit)
    typer.echo(f"installed {systemd_units.unit_path(unit)}")
    if not systemd_units.lingers():
        typer.echo("it stops when you log out; to keep it running: loginctl enable-linger", err=True)


@commands.command()
def start(folder: Folder = None) -> None:
    """Start the service again, after `hetpeer stop` or `finish`, or after an update of hetpeer."""
    from hetpeer.peer.daemon import systemd_units

    systemd_units.start(_unit(folder))


@commands.command()
def uninstall(folder: Folder = None) -> None:
    """Stop the service and remove it. Its home or run directory stays."""
    from hetpeer.peer.daemon import systemd_units

    systemd_units.uninstall(_unit(folder))
    typer.echo("uninstalled")


@commands.command()
def status(folder: Folder = None) -> None:
    """Show the state of the service and the link to its dashboard."""
    from hetpeer.peer.daemon import systemd_units

    unit = _unit(folder)
    said = systemd_units.properties(unit)
    doing = f": {said['StatusText']}" if said.get("StatusText") else ""
    typer.echo(f"{said.get('ActiveState', '')} ({said.get('SubState', '')}){doing}")
    typer.echo(f"{said.get('UnitFileState', '')} {systemd_units.unit_path(unit)}")
    here = standing_here(folder or systemd_units.home())
    if here is not None and here.dashboard is not None:
        typer.echo(f"dashboard at {here.dashboard}")


def _unit(folder: Path | None) -> Unit:
    from hetpeer.peer.daemon import systemd_units

    return systemd_units.VOLUNTEER if folder is None else systemd_units.serving(folder)
