"""`hetpeer join`: contribute this machine to a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from hetpeer.peer.cli.options import BootstrapOption, DashboardOption, HomeOption, joined_by

_ONLY_CHECK: Final = "hetpeer: do not begin"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(join)


def check(arguments: Sequence[str]) -> None:
    """What `join` would say of these arguments before it begins is said now. Raises a usage error, or `LocalError`."""
    alone = typer.Typer(add_completion=False)
    register(alone)
    command = typer.main.get_command(alone)
    with command.make_context("hetpeer join", list(arguments)) as context:
        context.meta[_ONLY_CHECK] = True
        command.invoke(context)


def join(
    context: typer.Context,
    invites: Annotated[
        list[str] | None,
        typer.Argument(metavar="INVITE", show_default=False, help="hetpeer://… as hetpeer invite prints it."),
    ] = None,
    *,
    bootstrap: BootstrapOption = None,
    run: Annotated[
        str, typer.Option(metavar="ID", help="The id of the run that it must be; an invite says that itself.")
    ] = "",
    home: HomeOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",  # noqa: S104
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port to listen on; 0 takes a free one.")
    ] = 0,
    name: Annotated[str, typer.Option(help="Public name; empty is anonymous.")] = "",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the compute worker.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    ram_limit: Annotated[str, typer.Option(help="Memory to offer: 50% of what is free, or 4GiB.")] = "50%",
    disk_limit: Annotated[
        str, typer.Option(help="Disk for what does not fit into memory: 10% of what is free, or 20GiB.")
    ] = "10%",
    trace: Annotated[
        bool, typer.Option("--trace", help="Write down what is done when, for `hetpeer trace`.")
    ] = False,
    dashboard: DashboardOption = "",
) -> None:
    """Contribute this machine to a run: by an invite or an address; without any, to the one joined last.

    Ctrl-C leaves within ten seconds and harms nobody; so does `hetpeer pause`.
    """
    from hetpeer.peer.home import default_home

    goal = joined_by([*(invites or ()), *(bootstrap or ())], home or default_home(), run)
    memory, disk = parse_limit(ram_limit), parse_limit(disk_limit)

    from hetpeer.peer.daemon.joining import join as take_part
    from hetpeer.peer.daemon.presence import JoinOptions
    from hetpeer.peer.lifecycle import run_daemon
    from hetpeer.peer.where import parse_where

    options = JoinOptions(
        bootstrap=goal.addresses,
        run=goal.run,
        voucher=goal.voucher,
        home=home or default_home(),
        host=host,
        port=port,
        name=name,
        threads=threads,
        device=device,
        ram_limit=memory,
        disk_limit=disk,
        trace=trace,
        dashboard=parse_where(dashboard),
    )
    if _ONLY_CHECK in context.meta:
        return
    stop = run_daemon(lambda leaving: take_part(options, leaving))
    typer.echo("left the run" if stop is None else f"finished: {stop.why}", err=True)


def parse_limit(text: str) -> float:
    """`50%` as a share (0.5), `4GiB`, `512MiB` or a number as bytes. Raises a usage error."""
    units = {"%": 0.01, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "": 1.0}
    lowered = text.strip().lower()
    for unit, factor in units.items():
        number = lowered.removesuffix(unit) if unit else lowered
        if (not unit or number != lowered) and number.replace(".", "", 1).isdecimal():
            value = float(number) * factor
            if unit == "%" and not 0 < value <= 1:
                break
            return value
    raise typer.BadParameter(f"{text!r} is neither a share such as 50% nor a size such as 4GiB")
