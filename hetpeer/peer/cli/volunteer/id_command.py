"""`hetpeer id`: who this machine is to others, and how to keep that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpeer.peer.cli.options import HomeOption

ReliableOption = Annotated[
    bool,
    typer.Option("--reliable", help="Of a reliable peer: what the run's author gives to hetpeer init."),
]

identities = typer.Typer(rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(identities, name="id")


@identities.callback(invoke_without_command=True)
def show(context: typer.Context, *, reliable: ReliableOption = False, home: HomeOption = None) -> None:
    """Print this peer's id; the key behind it is made at the first call, and leaves the machine by `hetpeer id backup` only."""
    if context.invoked_subcommand is not None:
        if reliable or home is not None:
            raise typer.BadParameter(f"say it after the word {context.invoked_subcommand}")
        return
    from hetpeer.peer.process.home import Home, default_home

    place = Home(home or default_home())
    typer.echo((place.reliable_identity() if reliable else place.identity()).peer_id)


@identities.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file; keep it where nobody reads it.")],
    *,
    reliable: ReliableOption = False,
    home: HomeOption = None,
) -> None:
    """Copy the key to FILE. Whoever has that file is this peer."""
    from hetpeer.peer.process.identity_backup import backup as copy

    identity = copy(_key(home, reliable=reliable), file)
    typer.echo(f"{identity.peer_id} is in {file}: who has that file is this peer", err=True)


@identities.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What hetpeer id backup wrote.")],
    *,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Where another identity is: keep that one beside the restored one."),
    ] = False,
    reliable: ReliableOption = False,
    home: HomeOption = None,
) -> None:
    """Be the peer whose key is in FILE."""
    from hetpeer.peer.process.identity_backup import restore as bring_back

    restored = bring_back(file, _key(home, reliable=reliable), replace=replace)
    if restored.kept is not None:
        typer.echo(f"the identity that was here before is in {restored.kept}", err=True)
    if restored.shared:
        typer.echo(
            f"other users of this machine can read {file}: chmod 600 {file}, if the disk can", err=True
        )
    typer.echo(restored.peer_id)


def _key(home: Path | None, *, reliable: bool) -> Path:
    from hetpeer.peer.process.home import Home, default_home

    place = Home(home or default_home())
    return place.reliable_key if reliable else place.key
