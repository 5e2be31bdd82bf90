"""`hetpeer pause`, `resume`, `finish` and `stop`: orders of the owner to the daemon."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hetpeer.peer.cli.options import HomeOption, home_of, parse_duration

if TYPE_CHECKING:
    from hetpeer.peer.control.control_messages import DaemonStatus

GONE_S = 10.0
"""Seconds in which a stopped daemon must have ended."""


def pause(
    *,
    duration: Annotated[
        str, typer.Option("--for", metavar="TIME", help="Resume by itself after this time, like 1h30m.")
    ] = "",
    home: HomeOption = None,
) -> None:
    """Free this machine's processor and memory at once.

    Until `hetpeer resume`; the daemon keeps running.
    """
    _order(home, "pause", parse_duration(duration) if duration else None)


def resume(*, home: HomeOption = None) -> None:
    """Continue after `hetpeer pause`."""
    _order(home, "resume")


def finish(*, home: HomeOption = None) -> None:
    """Leave the run when the current step is done."""
    _order(home, "finish")


def stop(*, home: HomeOption = None) -> None:
    """Leave the run now, like Ctrl-C.

    Returns when the daemon has ended. With --home DIR of a run directory: stop the reliable peer that serves
    it.
    """
    from hetpeer.dht.base.errors import LocalError
    from hetpeer.peer.control.control_client import connected
    from hetpeer.peer.control.control_messages import ControlRequest

    with connected(home_of(home)) as daemon:
        daemon.ask(ControlRequest(do="stop"))
        if not daemon.ended(GONE_S):
            raise LocalError(
                "HP-CTL-002",
                "the daemon has not ended",
                why=f"it is still running {GONE_S:.0f} s after it was asked to stop",
                fix="end its process (kill)",
            )
    typer.echo("stopped")


def _order(home: Path | None, do: Literal["pause", "resume", "finish"], for_s: float | None = None) -> None:
    """Give the daemon of `home` an order and show its state; `for_s`: seconds of a pause."""
    from hetpeer.peer.control.control_client import ask
    from hetpeer.peer.control.control_messages import ControlRequest

    typer.echo(standing_text(ask(home_of(home), ControlRequest(do=do, for_s=for_s))))


def standing_text(standing: DaemonStatus) -> str:
    """`paused (user) since 12:04, until 13:34`."""
    reason = f" ({standing.reason.replace('_', ' ')})" if standing.reason else ""
    until = "" if standing.until is None else f", until {_clock(standing.until)}"
    ends = "" if standing.ends is None else f"; leaves at {_clock(standing.ends)}"
    return f"{standing.state}{reason} since {_clock(standing.since)}{until}{ends}"


def _clock(seconds: float) -> str:
    """The time of day, with the date if that is not today's."""
    then, today = time.localtime(seconds), time.localtime()
    same = then[:3] == today[:3]
    return time.strftime("%H:%M" if same else "%Y-%m-%d %H:%M", then)
