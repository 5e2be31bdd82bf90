"""`hetpeer config`: show and change the settings of a volunteer (docs/limits.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.cli.options import HomeOption, JsonOption, home_of, standing_here

if TYPE_CHECKING:
    from hetpeer.peer.limits.setting_layers import MergedSettings

commands = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and change what hetpeer may use of this machine, and when.",
)


@commands.command()
def show(
    *,
    as_json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Show every setting and where it comes from: of the running volunteer, else of the next `join`."""
    from hetpeer.peer.limits.config_file import effective
    from hetpeer.peer.limits.setting_layers import DEFAULT, worded

    found = _running(home) or effective(home_of(home), {})
    if as_json:
        rows = {
            key: {"value": value, "source": found.sources.get(key, DEFAULT)}
            for key, value in found.settings.flat().items()
        }
        typer.echo(json.dumps({"schema": "hetpeer.config/1", "settings": rows}))
        return
    for key, value in found.settings.flat().items():
        typer.echo(f"{key:26} {worded(value):14} {found.sources.get(key, DEFAULT)}")


def _running(home: Path | None) -> MergedSettings | None:
    """Settings in force at the volunteer that runs from `home`; None if none runs."""
    from hetpeer.peer.limits.setting_layers import DEFAULT, MergedSettings, SettingsLayer, merged
    from hetpeer.peer.limits.settings import KEYS

    status = standing_here(home)
    told = {key: one for key, one in status.settings.items() if key in KEYS} if status is not None else {}
    if not told:
        return None
    values = {key: one.value for key, one in told.items()}
    sources = {key: one.source for key, one in told.items() if one.source != DEFAULT}
    return MergedSettings(merged([SettingsLayer("the running volunteer", values)]).settings, sources)


_COUNTS_IN = {"when.hours": "schedule", "when.idle_after": "idle"}


@commands.command("set")
def change(
    key: Annotated[str, typer.Argument(help="Name of the setting, such as limits.up.")],
    value: Annotated[str, typer.Argument(help="Its new value, such as 20mbit.")],
    *,
    home: HomeOption = None,
) -> None:
    """Change one setting, in the running daemon and in the file.

    If one of them refuses it, neither changes.
    """
    from hetpeer.peer.control.control_client import ask
    from hetpeer.peer.control.control_messages import ControlRequest
    from hetpeer.peer.limits.config_file import changed, config_path, effective, write
    from hetpeer.peer.limits.settings import AT_START

    here = home_of(home)
    path = config_path(here)
    changed(path, {key: value})  # nobody is asked for what the file cannot say
    since = " from the next start on" if key in AT_START else " from now on"
    try:
        if key not in AT_START:
            ask(here, ControlRequest(do="set", key=key, value=value))
    except LocalError as error:
        if error.code != "HP-CTL-001":
            raise
        since = f"; no volunteer runs from {here}"
    write(path, {key: value})
    typer.echo(f"{path}: {key} is {value}{since}")
    now = effective(here, {})
    if now.sources.get(key) != str(path):
        typer.echo(f"{now.sources[key]} overrides it at the next start", err=True)
    mode = _COUNTS_IN.get(key)
    if mode is not None and now.settings.when.mode != mode:
        typer.echo(f"{key} has an effect only in mode {mode}: hetpeer config set when.mode {mode}", err=True)


@commands.command()
def path(*, home: HomeOption = None) -> None:
    """Print the path of the file, whether it exists or not."""
    from hetpeer.peer.limits.config_file import config_path

    typer.echo(config_path(home_of(home)))
