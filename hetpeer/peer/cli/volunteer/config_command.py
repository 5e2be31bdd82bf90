"""`hetpeer config`: the settings of a volunteer on this machine (docs/limits.md)."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.cli.options import HomeOption

commands = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(commands, name="config", help="Show and change what a volunteer may use of this machine.")


@commands.command()
def show(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One object, for programs.")] = False,
    home: HomeOption = None,
) -> None:
    """Every setting that counts, and where it comes from. Options of `hetpeer join` may say otherwise."""
    from hetpeer.peer.limits.config_file import effective
    from hetpeer.peer.limits.settings import DEFAULT, worded
    from hetpeer.peer.process.home import default_home

    found = effective(home or default_home(), {})
    if as_json:
        rows = {
            key: {"value": value, "source": found.sources.get(key, DEFAULT)}
            for key, value in found.settings.flat().items()
        }
        typer.echo(json.dumps({"schema": "hetpeer.config/1", "settings": rows}))
        return
    for key, value in found.settings.flat().items():
        typer.echo(f"{key:26} {worded(value):14} {found.sources.get(key, DEFAULT)}")


_COUNTS_IN = {"when.hours": "schedule", "when.idle_after": "idle"}


@commands.command("set")
def change(key: str, value: str, *, home: HomeOption = None) -> None:
    """Change one setting, in the daemon that runs and in the file; in neither if one of them cannot have it so."""
    from hetpeer.peer.control.control_client import ask
    from hetpeer.peer.control.control_messages import Request
    from hetpeer.peer.limits.config_file import changed, config_path, effective, write
    from hetpeer.peer.limits.settings import AT_START
    from hetpeer.peer.process.home import default_home

    here = home or default_home()
    path = config_path(here)
    changed(path, key, value)  # nobody is asked for what the file cannot say
    since = " from the next start on" if key in AT_START else " from now on"
    try:
        if key not in AT_START:
            ask(here, Request(do="set", key=key, value=value))
    except LocalError as error:
        if error.code != "HP-CTL-001":
            raise
        since = f"; no volunteer runs from {here}"
    write(path, key, value)
    typer.echo(f"{path}: {key} is {value}{since}")
    now = effective(here, {})
    if now.sources.get(key) != str(path):
        typer.echo(f"{now.sources[key]} says otherwise, and counts at the next start", err=True)
    mode = _COUNTS_IN.get(key)
    if mode is not None and now.settings.when.mode != mode:
        typer.echo(f"{key} counts in the mode {mode} alone: hetpeer config set when.mode {mode}", err=True)


@commands.command()
def path(*, home: HomeOption = None) -> None:
    """Where the file is, or would be."""
    from hetpeer.peer.limits.config_file import config_path
    from hetpeer.peer.process.home import default_home

    typer.echo(config_path(home or default_home()))
