"""`hetpeer dashboard`: print the link to the volunteer's page, or serve a page that only watches."""

from __future__ import annotations

import typer

from hetpeer.peer.cli.options import (
    BootstrapOption,
    DashboardOption,
    HomeOption,
    InvitesArgument,
    asked,
    standing_here,
    together,
)


def dashboard(
    context: typer.Context,
    invites: InvitesArgument = None,
    *,
    bootstrap: BootstrapOption = None,
    dashboard: DashboardOption = "",
    home: HomeOption = None,
) -> None:
    """Print the link to the dashboard of this machine's volunteer.

    Without a volunteer, or with an INVITE, --bootstrap or --dashboard: serve a page that shows a run's swarm
    until Ctrl-C, without taking part.
    """
    from hetpeer.peer.limits.web_address import no_dashboard_place, parse_where
    from hetpeer.peer.process.lifecycle import run_daemon

    source = context.get_parameter_source("dashboard")  # the environment's is of the volunteer's own page
    another = source is not None and source.name == "COMMANDLINE"
    named = together(invites, bootstrap)
    here = None if named or another else standing_here(home)
    if here is not None and here.dashboard is not None:
        print(here.dashboard)
        return
    where = parse_where(dashboard)
    if where is None:
        raise no_dashboard_place(dashboard)
    from hetpeer.peer.web.daemon_web import watch

    goal = asked(named, home)
    run_daemon(lambda leaving: watch(goal, where, leaving))
