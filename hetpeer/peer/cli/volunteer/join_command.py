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


def join(
    context: typer.Context,
    invites: InvitesArgument = None,
    *,
    bootstrap: BootstrapOption = None,
    run: Annotated[
        str, typer.Option(metavar="ID", help="Id of the run to join; an invite already names it.")
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
            help="TCP port for tensors that volunteers send directly. [network.direct_port]",
        ),
    ] = None,
    lan: Annotated[
        bool | None,
        typer.Option(
            "--lan/--no-lan",
            show_default=False,
            help="Find a run in the local network if none is given, and be found there. [network.lan]",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(show_default=False, help="Name that others see. [node.name]")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="Processor threads of the compute worker. [compute.threads]"
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            show_default=False, help="Device to compute on: auto, cpu, cuda or cuda:N. [compute.device]"
        ),
    ] = None,
    cpu_limit: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Processor cores for all of hetpeer. [limits.cpu]"),
    ] = None,
    nice: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=19,
            show_default=False,
            help="How much the compute worker gives way to other programs. [limits.nice]",
        ),
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
            help="Disk space for data that does not fit into memory: 10% of what is free, or 20GiB. "
            "[limits.disk]",
        ),
    ] = None,
    files_limit: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Disk space for downloaded files of all runs: 50GiB or none. [limits.files]",
        ),
    ] = None,
    up_limit: Annotated[
        str | None, typer.Option(show_default=False, help="Upload: 20mbit, 2MB/s or none. [limits.up]")
    ] = None,
    down_limit: Annotated[
        str | None, typer.Option(show_default=False, help="Download: as --up-limit. [limits.down]")
    ] = None,
    transfer_cap: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Bytes sent and received in a month: 300GB or none. [limits.transfer_cap]",
        ),
    ] = None,
    temp_limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=150,
            show_default=False,
            help="Pause at this temperature of the GPU in °C; 0: no limit. [limits.temperature_c]",
        ),
    ] = None,
    cpu_temp_limit: Annotated[
        int | None,
        typer.Option(
            min=0, max=150, show_default=False, help="The same for the processor. [limits.cpu_temperature_c]"
        ),
    ] = None,
    power_limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=10_000,
            show_default=False,
            help="Average power of the GPU in watts; 0: no limit. [limits.gpu_power_w]",
        ),
    ] = None,
    when: Annotated[
        str | None,
        typer.Option(show_default=False, help="When to compute: always, idle or schedule. [when.mode]"),
    ] = None,
    hours: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Hours of --when schedule: 22:00-07:00, several with commas. [when.hours]",
        ),
    ] = None,
    idle_after: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="With --when idle: compute after this time without keyboard or pointer: 10m. "
            "[when.idle_after]",
        ),
    ] = None,
    on_battery: Annotated[
        str | None,
        typer.Option(show_default=False, help="What to do on battery: pause or run. [when.on_battery]"),
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
        typer.Option("--for", metavar="TIME", help="Leave by itself after this time, like 2h30m."),
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show which blocks it would take and what it would download, without taking part.",
        ),
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Record what is done when, for `hetpeer trace`.")
    ] = False,
    dashboard: DashboardOption = "",
) -> None:
    """Contribute this machine to a run.

    The run is given by an invite or the address of a peer. Without one: back to the run joined last; with
    --lan to a run in the local network.

    Ctrl-C leaves within ten seconds and harms nobody. Options override the settings in config.toml, whose
    names are in brackets (`hetpeer config show`).
    """
    from hetpeer.peer.process.home import default_home

    here = home or default_home()

    from hetpeer.peer.arrival.invites import destination
    from hetpeer.peer.daemon.dry_run import try_out
    from hetpeer.peer.daemon.join_run import join as take_part
    from hetpeer.peer.daemon.presence import JoinOptions
    from hetpeer.peer.limits.config_file import effective
    from hetpeer.peer.limits.settings import parse_where
    from hetpeer.peer.process.console import tell
    from hetpeer.peer.process.lifecycle import run_daemon

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
    if when is None and (hours or idle_after):  # either option implies its mode
        given["when.mode"] = "schedule" if hours else "idle"
    found = effective(here, {key: value for key, value in given.items() if value is not None})
    settings = found.settings
    named = together(invites, bootstrap)
    # An explicit --lan overrides the run joined last.
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
            raise typer.BadParameter("--dry-run has no effect in a service: leave it out")
        return
    if dry_run:
        run_loop(try_out(options))
        return
    stop = run_daemon(lambda leaving: take_part(options, leaving))
    tell("left the run" if stop is None else f"finished: {stop.why}")
