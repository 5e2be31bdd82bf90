"""`hetpeer status`: show a swarm, once or every few seconds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpeer.dht.base.errors import HetpeerError
from hetpeer.peer.cli.options import (
    BootstrapOption,
    HomeOption,
    InvitesArgument,
    JsonOption,
    asked,
    plain,
    run_loop,
    standing_here,
    together,
    watching,
)
from hetpeer.peer.cli.swarm.status_text import lines, own_lines, tables

if TYPE_CHECKING:
    from hetpeer.peer.arrival.invites import Destination
    from hetpeer.peer.control.control_messages import DaemonStatus
    from hetpeer.peer.watching.swarm_status import SwarmStatus

WATCH_S = 2.0


def status(
    invites: InvitesArgument = None,
    *,
    bootstrap: BootstrapOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again every few seconds, until Ctrl-C.")
    ] = False,
    devices: Annotated[
        bool,
        typer.Option("--devices", help="Print the volunteers as a file for `hetpeer plan --devices`."),
    ] = False,
    as_json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Show a run's swarm: progress, peers, blocks, links, credit.

    Any peer can be asked; by default the volunteer that runs here, or the run joined last. With --home DIR of
    a run directory: the reliable peer that serves it.
    """
    named = together(invites, bootstrap)
    if devices and watch and not as_json:
        raise typer.BadParameter("--devices with --watch prints one document after the other: add --json")
    if devices:
        run_loop(_write_down(asked(named, home), watch=watch, as_json=as_json))
        return

    def own() -> DaemonStatus | None:
        return None if named else standing_here(home)

    try:
        run_loop(_look(asked(named, home), _identity(home), own, watch=watch, as_json=as_json))
    except HetpeerError:  # of the swarm: what runs here can be told all the same
        if (standing := own()) is not None:
            _show_own(standing, as_json)
        raise


async def _write_down(goal: Destination, *, watch: bool, as_json: bool) -> None:
    from hetpeer.peer.planning.swarm_inventory import inventory
    from hetpeer.peer.watching.status_reader import observing

    async with observing(goal) as onlooker:

        async def look() -> None:
            found = inventory(onlooker.signed.manifest, await onlooker.adverts())
            print(json.dumps(found.document()) if as_json else "\n".join(found.lines()), flush=True)

        await (watching(look, WATCH_S) if watch else look())


def _identity(home: Path | None) -> str:
    """Peer id of this machine's volunteer; empty if it has never joined. Raises `LocalError` HP-ID-001."""
    from hetpeer.dht.identity.peer_identity import Identity
    from hetpeer.peer.process.home import default_home

    key = (home or default_home()) / "identity.key"
    return Identity.load(key).peer_id if os.path.lexists(key) else ""


async def _look(
    goal: Destination,
    identity: str,
    own: Callable[[], DaemonStatus | None],
    *,
    watch: bool,
    as_json: bool,
) -> None:
    from hetpeer.peer.watching.status_reader import observing

    async with observing(goal, identity) as onlooker:

        async def look() -> None:
            _show(await onlooker.status(), own(), as_json)

        if not watch:
            await look()
        elif as_json or plain(sys.stdout):
            await watching(look, WATCH_S)
        else:
            from rich.live import Live

            with Live(screen=False, auto_refresh=False) as live:

                async def redraw() -> None:
                    live.update(tables(await onlooker.status(), own()), refresh=True)

                await watching(redraw, WATCH_S)


def _show(found: SwarmStatus, own: DaemonStatus | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.document() | _own_fields(own)), flush=True)
    elif plain(sys.stdout):
        print("\n".join(lines(found, own)), flush=True)
    else:
        from rich.console import Console

        Console().print(tables(found, own))


def _show_own(own: DaemonStatus, as_json: bool) -> None:
    """Show the volunteer that runs here, for a swarm that does not answer."""
    from hetpeer.peer.watching.swarm_status import SCHEMA

    here = "\n".join(f"{label:<10}{text}" for label, text in own_lines(own))
    print(json.dumps({"schema": SCHEMA} | _own_fields(own)) if as_json else here, flush=True)


def _own_fields(own: DaemonStatus | None) -> dict[str, Any]:
    return {
        "here": None
        if own is None
        else own.model_dump(exclude={"addresses", "settings", "figures", "dashboard"})
    }
