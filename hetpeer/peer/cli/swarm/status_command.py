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
    home_of,
    plain,
    run_loop,
    standing_here,
    together,
    watching,
)
from hetpeer.peer.cli.swarm.status_text import Here, lines, own_lines, tables

if TYPE_CHECKING:
    from hetpeer.peer.arrival.destinations import Destination
    from hetpeer.peer.watching.swarm_status import SwarmStatus
    from hetpeer.peer.web.machine_load import LoadMeter

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
    a run directory: the reliable peer that serves it. With --watch also the load of this machine.
    """
    named = together(invites, bootstrap)
    if devices and watch and not as_json:
        raise typer.BadParameter("--devices with --watch prints one document after the other: add --json")
    if devices:
        run_loop(_write_down(asked(named, home), watch=watch, as_json=as_json))
        return

    here = _Looks(home, load=watch and not as_json) if not named else lambda: None
    try:
        run_loop(_look(asked(named, home), _identity(home), here, watch=watch, as_json=as_json))
    except HetpeerError:  # of the swarm: what runs here can be told all the same
        if (own := here()) is not None:
            _show_own(own, as_json)
        raise


class _Looks:
    """Repeated looks at the daemon that runs from `home`, with `load` also at the load of its machine."""

    def __init__(self, home: Path | None, *, load: bool) -> None:
        self._home = home
        self._load = load
        self._meter: tuple[int, LoadMeter] | None = None
        """Process id of the daemon, and the meter of its load."""

    def __call__(self) -> Here | None:
        own = standing_here(self._home)
        if own is None or own.figures is None or not self._load:
            return None if own is None else Here(own)
        import psutil

        from hetpeer.peer.limits import nvml
        from hetpeer.peer.web.machine_load import LoadMeter

        try:
            if self._meter is None or self._meter[0] != own.figures.pid:
                self._meter = own.figures.pid, LoadMeter(home_of(self._home), own.figures.pid)
                return Here(own)  # the load is that between two looks
            return Here(own, self._meter[1].look(), tuple(nvml.loads()))
        except (psutil.Error, OSError):  # it has just ended
            self._meter = None
            return Here(own)


async def _write_down(goal: Destination, *, watch: bool, as_json: bool) -> None:
    """Print an inventory of the swarm, a device file for `hetpeer plan`, once or every WATCH_S seconds."""
    from hetpeer.peer.planning.swarm_inventory import inventory
    from hetpeer.peer.watching.status_reader import observing

    async with observing(goal) as onlooker:

        async def look() -> None:
            adverts, leaves = await onlooker.adverts(), await onlooker.leaves_per_hour()
            found = inventory(onlooker.signed.manifest, adverts, leaves)
            print(json.dumps(found.document()) if as_json else "\n".join(found.lines()), flush=True)

        await (watching(look, WATCH_S) if watch else look())


def _identity(home: Path | None) -> str:
    """Peer id of this machine's volunteer; empty if it has never joined. Raises `LocalError` HP-ID-001."""
    from hetpeer.dht.identity.peer_identity import Identity

    key = home_of(home) / "identity.key"
    return Identity.load(key).peer_id if os.path.lexists(key) else ""


async def _look(
    goal: Destination,
    identity: str,
    here: Callable[[], Here | None],
    *,
    watch: bool,
    as_json: bool,
) -> None:
    """Print the swarm's status, once or every WATCH_S seconds, in place on a terminal."""
    from hetpeer.peer.watching.status_reader import observing

    async with observing(goal, identity) as onlooker:

        async def look() -> None:
            _show(await onlooker.status(), here(), as_json)

        if not watch:
            await look()
        elif as_json or plain(sys.stdout):
            await watching(look, WATCH_S)
        else:
            from rich.live import Live

            with Live(screen=False, auto_refresh=False) as live:

                async def redraw() -> None:
                    live.update(tables(await onlooker.status(), here()), refresh=True)

                await watching(redraw, WATCH_S)


def _show(found: SwarmStatus, here: Here | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.document() | _own_fields(here)), flush=True)
    elif plain(sys.stdout):
        print("\n".join(lines(found, here)), flush=True)
    else:
        from rich.console import Console

        Console().print(tables(found, here))


def _show_own(here: Here, as_json: bool) -> None:
    """Show the volunteer that runs here, for a swarm that does not answer."""
    from hetpeer.peer.watching.swarm_status import SCHEMA

    shown = "\n".join(f"{label:<10}{text}" for label, text in own_lines(here))
    print(json.dumps({"schema": SCHEMA} | _own_fields(here)) if as_json else shown, flush=True)


def _own_fields(here: Here | None) -> dict[str, Any]:
    return {
        "here": None
        if here is None
        else here.own.model_dump(exclude={"addresses", "settings", "figures", "dashboard"})
    }
