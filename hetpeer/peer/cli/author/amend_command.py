"""`hetpeer amend`: sign who the reliable peers are and who may take part."""

from __future__ import annotations

from typing import Annotated

import typer

from hetpeer.peer.cli.options import RunDir


def amend(
    directory: RunDir,
    reliable: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="Id of a reliable peer from now on: name all of them, 1, 3 or 5 (default: show them).",
        ),
    ] = None,
    ban: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="Id of a peer that may not take part any more; repeatable, as the options below.",
        ),
    ] = None,
    unban: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="Id of a banned peer that may take part again, also after a ban by spot checks.",
        ),
    ] = None,
    enlist: Annotated[
        list[str] | None,
        typer.Option(
            "--list", metavar="ID", help="Id of a peer that may take part in a run with --admission listed."
        ),
    ] = None,
    unlist: Annotated[list[str] | None, typer.Option(metavar="ID", help="Id to take off that list.")] = None,
    revoke: Annotated[
        list[str] | None,
        typer.Option(metavar="SERIAL", help="Serial number of a voucher that admits nobody any more."),
    ] = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDR",
            help="Address of a running reliable peer to tell, if none runs from DIR; repeatable.",
        ),
    ] = None,
) -> None:
    """Change who may take part in a run, and its reliable peers.

    Without options: show them. The run goes on meanwhile.
    """
    from hetpeer.bootstrap.run.amendment import MembershipChange
    from hetpeer.dht.identity.addresses import parse_address
    from hetpeer.peer.cli.options import run_loop
    from hetpeer.peer.reliable.reliable_members import amended, deliver

    addresses = tuple(parse_address(text) for text in bootstrap or ())
    change = MembershipChange(
        coordinators=tuple(reliable or ()),
        ban=tuple(ban or ()),
        unban=tuple(unban or ()),
        enlist=tuple(enlist or ()),
        unlist=tuple(unlist or ()),
        revoke=tuple(revoke or ()),
    )
    membership_config = amended(directory, change)
    for peer in membership_config.peers:
        print(peer)
    latest = membership_config.amendment
    said = ("banned", "listed", "pardoned") if latest is not None else ()
    for word in said:
        for one in getattr(latest, word):
            print(f"{word} {one}")
    if addresses and membership_config.data:
        run_loop(deliver(membership_config, addresses))
    if change != MembershipChange():
        print(f"amendment {membership_config.sequence} is signed")
    if reliable:
        print("on each new one: hetpeer bootstrap DIR --peers ADDR")
