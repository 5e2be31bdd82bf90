"""`hetpeer join`: contribute this machine to a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from hetpeer.peer.cli.options import BootstrapOption, DashboardOption, HomeOption, joined_by, need_lan

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
    host: Annotated[
        str | None, typer.Option(show_default=False, help="Address to listen on. [network.host]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, show_default=False, help="TCP port to listen on. [network.port]"),
    ] = None,
    lan: Annotated[
        bool | None,
        typer.Option(
            "--lan/--no-lan",
            show_default=False,
            help="Without an address: find a run in the local network; and be found there. [network.lan]",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(show_default=False, help="Public name. [node.name]")] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="CPU threads of the compute worker. [compute.threads]"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(show_default=False, help="auto, cpu, cuda or cuda:N. [compute.device]")
    ] = None,
    cpu_limit: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Processor cores for all of hetpeer. [limits.cpu]"),
    ] = None,
    ram_limit: Annotated[
        str | None,
        typer.Option(show_default=False, help="Memory to offer: 50% of what is free, or 4GiB. [limits.ram]"),
    ] = None,
    disk_limit: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Disk for what does not fit into memory: 10% of what is free, or 20GiB. [limits.disk]",
        ),
    ] = None,
    up_limit: Annotated[
        str | None, typer.Option(show_default=False, help="Upload: 20mbit, 2MB/s or none. [limits.up]")
    ] = None,
    down_limit: Annotated[
        str | None, typer.Option(show_default=False, help="Download, likewise. [limits.down]")
    ] = None,
    transfer_cap: Annotated[
        str | None,
        typer.Option(show_default=False, help="Up and down in a month: 300GB. [limits.transfer_cap]"),
    ] = None,
    when: Annotated[
        str | None, typer.Option(show_default=False, help="always, idle or schedule. [when.mode]")
    ] = None,
    hours: Annotated[
        str | None,
        typer.Option(
            show_default=False, help="Of a schedule: 22:00-07:00, several with commas. [when.hours]"
        ),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write down what is done when, for `hetpeer trace`.")
    ] = False,
    dashboard: DashboardOption = "",
) -> None:
    """Contribute this machine to a run: by an invite or an address; without any, to the one joined last, or with --lan one of this house.

    Ctrl-C leaves within ten seconds and harms nobody; so does `hetpeer pause`. Options beat config.toml: what
    stands in brackets is the setting there (`hetpeer config show`).
    """
    from hetpeer.peer.home import default_home

    here = home or default_home()

    from hetpeer.peer.arrival.invites import destination
    from hetpeer.peer.console import tell
    from hetpeer.peer.daemon.configfile import effective
    from hetpeer.peer.daemon.joining import join as take_part
    from hetpeer.peer.daemon.presence import JoinOptions
    from hetpeer.peer.lifecycle import run_daemon
    from hetpeer.peer.where import parse_where

    given = {
        "network.host": host,
        "network.port": port,
        "network.lan": lan,
        "node.name": name,
        "compute.threads": threads,
        "compute.device": device,
        "limits.cpu": cpu_limit,
        "limits.ram": ram_limit,
        "limits.disk": disk_limit,
        "limits.up": up_limit,
        "limits.down": down_limit,
        "limits.transfer_cap": transfer_cap,
        "when.mode": when,
        "when.hours": hours,
    }
    settings = effective(here, {key: value for key, value in given.items() if value is not None}).settings
    named = [*(invites or ()), *(bootstrap or ())]
    # To say --lan means more than what was joined once.
    goal = destination(named, run) if lan else joined_by(named, here, run, near=settings.network.lan)
    if settings.network.lan:
        need_lan()
    options = JoinOptions(
        bootstrap=goal.addresses,
        run=goal.run,
        voucher=goal.voucher,
        home=here,
        settings=settings,
        trace=trace,
        dashboard=parse_where(dashboard or settings.dashboard.listen),
    )
    if _ONLY_CHECK in context.meta:
        return
    stop = run_daemon(lambda leaving: take_part(options, leaving))
    tell("left the run" if stop is None else f"finished: {stop.why}")
