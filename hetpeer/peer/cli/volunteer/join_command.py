"""`hetpeer join`: contribute this machine to a run."""

from __future__ import annotations

from typing import Annotated

import typer

from hetpeer.peer.cli.options import (
    BootstrapOption,
    DashboardOption,
    HomeOption,
    InvitesArgument,
    joined_by,
    need_lan,
    only_checked,
    parse_duration,
    run_loop,
    together,
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(join)


def join(
    context: typer.Context,
    invites: InvitesArgument = None,
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
    direct_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            show_default=False,
            help="TCP port to which volunteers send tensors past p2pd. [network.direct_port]",
        ),
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
    nice: Annotated[
        int | None,
        typer.Option(min=0, max=19, show_default=False, help="Added to the worker's niceness. [limits.nice]"),
    ] = None,
    ram_limit: Annotated[
        str | None,
        typer.Option(show_default=False, help="Memory to offer: 50% of what is free, or 4GiB. [limits.ram]"),
    ] = None,
    vram_limit: Annotated[
        str | None,
        typer.Option(show_default=False, help="Share of the GPU's memory: 80%. [limits.gpu_memory]"),
    ] = None,
    disk_limit: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Disk for what does not fit into memory: 10% of what is free, or 20GiB. [limits.disk]",
        ),
    ] = None,
    files_limit: Annotated[
        str | None,
        typer.Option(
            show_default=False, help="Disk for fetched files of all runs: 50GiB or none. [limits.files]"
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
    temp_limit: Annotated[
        int | None,
        typer.Option(min=0, max=150, show_default=False, help="Of the GPU, in °C. [limits.temperature_c]"),
    ] = None,
    cpu_temp_limit: Annotated[
        int | None,
        typer.Option(min=0, max=150, show_default=False, help="Of the processor. [limits.cpu_temperature_c]"),
    ] = None,
    power_limit: Annotated[
        int | None,
        typer.Option(
            min=0, max=10_000, show_default=False, help="Watts of the GPU on average. [limits.gpu_power_w]"
        ),
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
    idle_after: Annotated[
        str | None,
        typer.Option(
            show_default=False, help="Without a key or pointer for so long it is idle: 10m. [when.idle_after]"
        ),
    ] = None,
    on_battery: Annotated[
        str | None, typer.Option(show_default=False, help="pause or run. [when.on_battery]")
    ] = None,
    yield_to_games: Annotated[
        bool | None,
        typer.Option(
            "--yield-to-games/--no-yield-to-games",
            show_default=False,
            help="Pause while another program uses the GPU. [when.yield_to_games]",
        ),
    ] = None,
    duration: Annotated[
        str,
        typer.Option("--for", metavar="TIME", help="Finish by itself after so long from now on, like 2h30m."),
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Say which place it would take, and what it would fetch; do not take part."
        ),
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write down what is done when, for `hetpeer trace`.")
    ] = False,
    dashboard: DashboardOption = "",
) -> None:
    """Contribute this machine to a run: by an invite or an address; without any, to the one joined last, or with --lan one of this house.

    Ctrl-C leaves within ten seconds and harms nobody; so does `hetpeer pause`. Options beat config.toml: what
    stands in brackets is the setting there (`hetpeer config show`).
    """
    from hetpeer.peer.process.home import default_home

    here = home or default_home()

    from hetpeer.peer.arrival.invites import destination
    from hetpeer.peer.daemon.dry_run import try_out
    from hetpeer.peer.daemon.join_run import join as take_part
    from hetpeer.peer.daemon.presence import JoinOptions
    from hetpeer.peer.limits.config_file import effective
    from hetpeer.peer.process.console import tell
    from hetpeer.peer.process.lifecycle import run_daemon
    from hetpeer.peer.process.web_address import parse_where

    given = {
        "network.host": host,
        "network.port": port,
        "network.direct_port": direct_port,
        "network.lan": lan,
        "node.name": name,
        "compute.threads": threads,
        "compute.device": device,
        "limits.cpu": cpu_limit,
        "limits.nice": nice,
        "limits.ram": ram_limit,
        "limits.gpu_memory": vram_limit,
        "limits.disk": disk_limit,
        "limits.files": files_limit,
        "limits.up": up_limit,
        "limits.down": down_limit,
        "limits.transfer_cap": transfer_cap,
        "limits.temperature_c": temp_limit,
        "limits.cpu_temperature_c": cpu_temp_limit,
        "limits.gpu_power_w": power_limit,
        "when.mode": when,
        "when.hours": hours,
        "when.idle_after": idle_after,
        "when.on_battery": on_battery,
        "when.yield_to_games": yield_to_games,
        "dashboard.listen": dashboard or None,
    }
    if when is None and (hours or idle_after):  # who says that, and no mode, means it
        given["when.mode"] = "schedule" if hours else "idle"
    found = effective(here, {key: value for key, value in given.items() if value is not None})
    settings = found.settings
    named = together(invites, bootstrap)
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
        for_s=parse_duration(duration) if duration else None,
        sources=found.sources,
        trace=trace,
        dashboard=parse_where(settings.dashboard.listen),
    )
    if only_checked(context):
        if dry_run:
            raise typer.BadParameter("a service takes part: leave --dry-run out")
        return
    if dry_run:
        run_loop(try_out(options))
        return
    stop = run_daemon(lambda leaving: take_part(options, leaving))
    tell("left the run" if stop is None else f"finished: {stop.why}")
