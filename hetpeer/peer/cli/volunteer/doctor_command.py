"""`hetpeer doctor` and `hetpeer bench`: whether a volunteer would work on this machine, and its speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetpeer.peer.cli.options import (
    BootstrapOption,
    HomeOption,
    InvitesArgument,
    JsonOption,
    home_of,
    run_loop,
    together,
)

if TYPE_CHECKING:
    from hetpeer.peer.arrival.destinations import Destination
    from hetpeer.peer.checkup.findings import Finding


def doctor(
    invites: InvitesArgument = None,
    *,
    bootstrap: BootstrapOption = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a new zip file for somebody who helps you: these findings, the log, versions.",
        ),
    ] = None,
    as_json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Check whether a volunteer would work on this machine.

    Says what to do if not. With an invite or address: also whether its peers answer, and whether they reach
    this machine. Changes nothing; needs no network without an invite. The exit status is that of the first
    failure.
    """
    from hetpeer.peer.arrival.destinations import destination
    from hetpeer.peer.checkup import findings

    named = together(invites, bootstrap)
    goal = destination(named) if named else None
    place = home_of(home)
    found = run_loop(_examine(place, goal, quiet=as_json))
    print(json.dumps(findings.document(found)) if as_json else findings.summary(found))
    if bundle is not None:
        from hetpeer.peer.checkup.support_bundle import write_bundle

        write_bundle(bundle, place, found)
        typer.echo(f"{bundle}: addresses and names are removed; read it before you give it away", err=True)
    raise typer.Exit(findings.exit_code(found))


async def _examine(home: Path, goal: Destination | None, *, quiet: bool) -> list[Finding]:
    from hetpeer.peer.checkup.examination import examine

    found = []
    async for finding in examine(home, goal):
        found.append(finding)
        if not quiet:
            print(finding.line(), flush=True)
    return found


def bench(*, as_json: JsonOption = False, home: HomeOption = None) -> None:
    """Measure the speed of this machine.

    Takes a few seconds: matrix products, memory, the disk of its home, and its own network.
    """
    from hetpeer.peer.checkup import machine_speeds
    from hetpeer.stages.block.device import survey

    machine, found = survey(), []
    for speed in machine_speeds.measure(home_of(home), machine.cores):
        found.append(speed)
        if not as_json:
            print(speed.line(), flush=True)
    if as_json:
        print(json.dumps(machine_speeds.document(machine, found)))
