"""`hetpeer amend`: the author's word on who the reliable peers are, and who may take part."""

from __future__ import annotations

from typing import Annotated

import typer

from hetpeer.peer.cli.options import RunDir


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(amend)


def amend(
    directory: RunDir,
    reliable: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="A reliable peer from now on: name all of them, 1, 3 or 5 (default: show who they are).",
        ),
    ] = None,
    ban: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="A peer that may not take part any more. Repeatable, as all others."),
    ] = None,
    unban: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID", help="One that may again, whoever has banned it: you, or what others found."
        ),
    ] = None,
    enlist: Annotated[
        list[str] | None,
        typer.Option("--list", metavar="ID", help="One that may take part in a run of --admission listed."),
    ] = None,
    unlist: Annotated[list[str] | None, typer.Option(metavar="ID", help="One that may not any more.")] = None,
    revoke: Annotated[
        list[str] | None,
        typer.Option(metavar="SERIAL", help="An invite's voucher that is to admit nobody any more."),
    ] = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDR", help="One that runs, to be told, if none runs from DIR. Repeatable."),
    ] = None,
) -> None:
    """Say who the reliable peers of a run are, and who may take part. Nothing is interrupted."""
    from hetpeer.bootstrap.run.amendment import MembershipChange
    from hetpeer.dht.identity.addresses import parse_address
    from hetpeer.peer.cli.options import run_loop
    from hetpeer.peer.reliable.publish_amendment import amended, deliver

    addresses = tuple(parse_address(text) for text in bootstrap or ())
    change = MembershipChange(
        coordinators=tuple(reliable or ()),
        ban=tuple(ban or ()),
        unban=tuple(unban or ()),
        enlist=tuple(enlist or ()),
        unlist=tuple(unlist or ()),
        revoke=tuple(revoke or ()),
    )
    council = amended(directory, change)
    for peer in council.peers:
        print(peer)
    latest = council.amendment
    said = ("banned", "listed", "pardoned") if latest is not None else ()
    for word in said:
        for one in getattr(latest, word):
            print(f"{word} {one}")
    if addresses and council.data:
        run_loop(deliver(council, addresses))
    if change != MembershipChange():
        print(f"amendment {council.sequence} is signed")
    if reliable:
        print("on each that is new: hetpeer bootstrap DIR --peers ADDR")
