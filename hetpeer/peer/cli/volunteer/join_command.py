"""`hetpeer join`: contribute this machine to a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hetpeer.peer.cli.options import (
    BootstrapOption,
    DashboardOption,
    HomeOption,
    InvitesArgument,
    home_of,
    joined_by,
    need_lan,
    only_checked,
    parse_duration,
    run_loop,
    together,
)
from hetpeer.peer.cli.setting_options import with_settings
from hetpeer.peer.limits.settings import Settings

SETTINGS = {
    f"{section}_{key}": f"{section}.{key}"
    for section in ("network", "node", "compute", "limits", "when")
    for key in type(getattr(Settings(), section)).model_fields
}
"""Parameter of `join` → the setting that it overrides, in the order of the help."""


@with_settings(SETTINGS)
def join(
    context: typer.Context,
    invites: InvitesArgument = None,
    *,
    bootstrap: BootstrapOption = None,
    run: Annotated[
        str, typer.Option(metavar="ID", help="Id of the run to join; an invite already names it.")
    ] = "",
    home: HomeOption = None,
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
    **settings: Any,
) -> None:
    """Contribute this machine to a run.

    The run is given by an invite or the address of a peer. Without one: back to the run joined last; with
    --lan to a run in the local network.

    Ctrl-C leaves within ten seconds. If nobody else holds its blocks, their state is handed over first; a
    line says so if that fails. Options override the settings in config.toml, whose names are in brackets
    (`hetpeer config show`).
    """
    here = home_of(home)

    from hetpeer.peer.arrival.destinations import destination
    from hetpeer.peer.daemon.dry_run import try_out
    from hetpeer.peer.daemon.join_run import join as take_part
    from hetpeer.peer.daemon.presence import JoinOptions
    from hetpeer.peer.limits.config_file import config_path, effective
    from hetpeer.peer.limits.web_address import parse_where
    from hetpeer.peer.process.confinement import confine_service
    from hetpeer.peer.process.console import tell
    from hetpeer.peer.process.lifecycle import run_daemon

    given = {SETTINGS[name]: value for name, value in settings.items() if value is not None}
    if dashboard:
        given["dashboard.listen"] = dashboard
    if "when.mode" not in given and (given.get("when.hours") or given.get("when.idle_after")):
        # either option implies its mode
        given["when.mode"] = "schedule" if given.get("when.hours") else "idle"
    found = effective(here, given)
    lan = given.get("network.lan")
    named = together(invites, bootstrap)
    # An explicit --lan overrides the run joined last.
    goal = destination(named, run) if lan else joined_by(named, here, run, near=found.settings.network.lan)
    if found.settings.network.lan:
        need_lan()
    options = JoinOptions(
        bootstrap=goal.addresses,
        run=goal.run,
        voucher=goal.voucher,
        home=here,
        settings=found.settings,
        for_s=parse_duration(duration) if duration else None,
        sources=found.sources,
        trace=trace,
        dashboard=parse_where(found.settings.dashboard.listen),
    )
    if only_checked(context):
        if dry_run:
            raise typer.BadParameter("--dry-run has no effect in a service: leave it out")
        return
    if dry_run:
        run_loop(try_out(options))
        return
    confine_service([here, config_path(here).parent])
    stop = run_daemon(lambda leaving: take_part(options, leaving))
    tell("left the run" if stop is None else f"finished: {stop.why}")
