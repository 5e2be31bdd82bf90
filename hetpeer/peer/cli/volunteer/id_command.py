"""`hetpeer id`: print, back up and restore the identity of this peer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpeer.peer.cli.options import HomeOption

ReliableOption = Annotated[
    bool,
    typer.Option(
        "--reliable", help="The identity as a reliable peer, for the author's hetpeer init --reliable."
    ),
]

commands = typer.Typer(rich_markup_mode=None)


@commands.callback(invoke_without_command=True)
def show(context: typer.Context, *, reliable: ReliableOption = False, home: HomeOption = None) -> None:
    """Print this peer's id. Its private key is made at the first call; only `hetpeer id backup` copies it."""
    if context.invoked_subcommand is not None:
        if reliable or home is not None:
            raise typer.BadParameter(f"give that option after the word {context.invoked_subcommand}")
        return
    from hetpeer.peer.process.home import Home, default_home

    place = Home(home or default_home())
    typer.echo((place.reliable_identity() if reliable else place.identity()).peer_id)


@commands.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file; keep it secret.")],
    *,
    reliable: ReliableOption = False,
    home: HomeOption = None,
) -> None:
    """Copy the private key to FILE. Everybody who has that file can act as this peer."""
    from hetpeer.peer.process.identity_backup import backup as copy

    identity = copy(_key(home, reliable=reliable), file)
    typer.echo(
        f"the key of {identity.peer_id} is in {file}: keep it secret, everybody who has it can act as this "
        "peer",
        err=True,
    )


@commands.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that hetpeer id backup has written.")],
    *,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="If there is another identity, keep it in a file beside the restored one."
        ),
    ] = False,
    reliable: ReliableOption = False,
    home: HomeOption = None,
) -> None:
    """Restore the identity whose key is in FILE."""
    from hetpeer.peer.process.identity_backup import restore as bring_back

    restored = bring_back(file, _key(home, reliable=reliable), replace=replace)
    if restored.kept is not None:
        typer.echo(f"the identity used until now is kept in {restored.kept}", err=True)
    if restored.shared:
        typer.echo(f"other users of this machine can read {file}: chmod 600 {file}", err=True)
    typer.echo(restored.peer_id)


def _key(home: Path | None, *, reliable: bool) -> Path:
    from hetpeer.peer.process.home import Home, default_home

    place = Home(home or default_home())
    return place.reliable_key if reliable else place.key
