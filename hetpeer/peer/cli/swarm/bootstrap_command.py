"""`hetpeer bootstrap`: run a reliable peer of a run, or a rendezvous for peers of any run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpeer.peer.cli.options import DashboardOption, HomeOption, need_lan, only_checked, run_loop
from hetpeer.peer.cli.setting_options import with_settings
from hetpeer.peer.process.console import tell

if TYPE_CHECKING:
    from hetpeer.bootstrap.run.seat_plan import SeatPlan
    from hetpeer.peer.arrival.destinations import Invite


RATE_LIMITS = {"limits_up": "limits.up", "limits_down": "limits.down"}
"""Parameter of `bootstrap` → the setting that it overrides."""


@with_settings(RATE_LIMITS)
def bootstrap(
    context: typer.Context,
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Run directory made by hetpeer init, or a new folder for a copy of it. Without DIR: a "
            "rendezvous.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",  # noqa: S104
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port to listen on; 0 takes a free one.")
    ] = 31330,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDR",
            help="Address of a peer of the run, or an invite to it, from which DIR is copied if it does not "
            "exist; or of a"
            " rendezvous. Repeatable.",
        ),
    ] = None,
    stand_in: Annotated[
        bool,
        typer.Option("--stand-in", help="Compute blocks that no volunteer holds, until one does."),
    ] = False,
    placement: Annotated[
        str,
        typer.Option(
            metavar="POLICY", help="Which place a newcomer is advised to take. {placement policies}."
        ),
    ] = "step-time",
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Seat the named volunteers as planned (hetpeer plan … --out FILE). The run keeps the plan.",
        ),
    ] = None,
    keep_places: Annotated[
        bool,
        typer.Option(
            "--keep-places", help="Do not plan: volunteers choose their blocks themselves and keep them."
        ),
    ] = False,
    lan: Annotated[
        bool,
        typer.Option("--lan", help="Let volunteers in the local network find the run (hetpeer join --lan)."),
    ] = False,
    dashboard: DashboardOption = "",
    home: HomeOption = None,
    **settings: Any,
) -> None:
    """Serve a run to its volunteers.

    Gives out its data, keeps its log and coordinates. Prints the commands with which others join.

    Without DIR: serve as a rendezvous and relay, where peers of any run find each other (--peers).
    """
    from hetpeer.bootstrap.state.placement_policies import DEFAULT, PLACEMENT_POLICIES
    from hetpeer.peer.arrival.destinations import destination
    from hetpeer.peer.limits.config_file import effective
    from hetpeer.peer.process.confinement import confine_service
    from hetpeer.peer.process.home import Home, default_home
    from hetpeer.peer.process.lifecycle import run_daemon

    if placement not in PLACEMENT_POLICIES:
        raise typer.BadParameter(
            f"unknown placement policy {placement!r}; known: {', '.join(PLACEMENT_POLICIES)}"
        )
    goal = destination(peers or ())
    known = goal.addresses

    place = home or default_home()
    folder = Home(place).rendezvous if directory is None else directory
    given = {RATE_LIMITS[name]: value for name, value in settings.items() if value is not None}
    limits = effective(folder, given)
    if directory is None:
        source = context.get_parameter_source("dashboard")  # the environment's is of daemons that have one
        shown = source is not None and source.name == "COMMANDLINE"
        if stand_in or keep_places or plan is not None or lan or shown or placement != DEFAULT:
            raise typer.BadParameter(
                "without DIR this is a rendezvous, which has no run: give DIR, or leave that option out"
            )
        from hetpeer.peer.arrival.rendezvous import RendezvousOptions, serve_rendezvous

        meeting = RendezvousOptions(home=place, host=host, port=port, peers=known, limits=limits)
        if only_checked(context):
            return
        confine_service([place])
        run_daemon(lambda leaving: serve_rendezvous(meeting, leaving, _announce_rendezvous))
        return

    if lan:
        need_lan()
    from hetpeer.bootstrap.run.run_directory import RunDirectory
    from hetpeer.peer.limits.web_address import parse_where
    from hetpeer.peer.reliable.reliable_members import mirror
    from hetpeer.peer.reliable.serve_run import BootstrapOptions, serve_run

    is_there = not known or (directory / "manifest.hetpeer").exists()
    seats = None if plan is None else _seats(plan, directory, is_there=is_there)
    options = BootstrapOptions(
        directory=directory,
        host=host,
        port=port,
        peers=known,
        stand_in=stand_in,
        placement=placement,
        plan=seats,
        keep_places=keep_places,
        dashboard=parse_where(dashboard),
        lan=lan,
        limits=limits,
    )
    if only_checked(context):
        if is_there:
            RunDirectory.open(directory)
        return
    if not is_there:
        run_loop(mirror(directory, goal, Home(place)))
        if plan is not None:
            _seats(plan, directory, is_there=True)

    def announce(address: str, invite: Invite) -> None:
        _announce_run(address, invite, directory)

    confine_service([directory, place])
    halt = run_daemon(lambda leaving: serve_run(options, leaving, announce))
    tell("stopped; start it again to continue the run" if halt is None else f"finished: {halt.why}")


def _seats(plan: Path, directory: Path, *, is_there: bool) -> SeatPlan:
    """The plan of a file. Raises `LocalError` HP-PLAN-006, and HP-PLAN-007 if the run is there."""
    from hetpeer.bootstrap.run.run_directory import RunDirectory
    from hetpeer.peer.planning.plan_files import check_fits, read_plan

    seats = read_plan(plan)
    if is_there:
        check_fits(seats, RunDirectory.open(directory).manifest)
    return seats


def _announce_rendezvous(address: str) -> None:
    typer.echo("this is a rendezvous: peers of any run find each other here; others use it with", err=True)
    typer.echo(f"hetpeer bootstrap DIR --peers {address}")


def _announce_run(address: str, invite: Invite, directory: Path) -> None:
    """Print the commands that join; warn if only the local network reaches the addresses."""
    from hetpeer.dht.identity.addresses import is_far
    from hetpeer.peer.arrival.destinations import is_loopback

    typer.echo(f"hetpeer join --bootstrap {address}\nhetpeer join {invite}")
    own = [one.socket for one in invite.addresses if one.socket is not None]
    if own and all(is_loopback(ip) for ip, _ in own):
        typer.echo("only this machine reaches this address; --host 0.0.0.0 listens for others", err=True)
    elif own and not any(one.socket is None or is_far(one) for one in invite.addresses):
        typer.echo(
            "only this machine and its local network reach these addresses; for others forward TCP port "
            f"{own[0][1]}"
            f" in your router, then: hetpeer invite {directory} --bootstrap HOST:{own[0][1]}",
            err=True,
        )
