"""Errors that end `hetpeer join` when a run rejects this peer."""

from __future__ import annotations

from hetpeer.averaging.effects import Stop
from hetpeer.dht.base.errors import ExitCode, LocalError


def rejection(stop: Stop) -> LocalError:
    """The error for the reason in `stop.rejected` (docs/admission.md)."""
    match stop.rejected:
        case "version":
            return LocalError(
                "HP-RUN-002",
                "the run needs another version of hetpeer",
                why=stop.why,
                fix="use the version of hetpeer that the run was made for",
                exit_code=ExitCode.VERSION,
            )
        case "banned":
            return LocalError(
                "HP-RUN-019",
                "the run is closed to this peer",
                why=stop.why,
                fix="ask the run's author",
                exit_code=ExitCode.RUN_CLOSED,
            )
        case "uninvited":
            return LocalError(
                "HP-RUN-020",
                "the run takes invited or listed peers only",
                why=stop.why,
                fix="ask its author for an invite, and give the whole link to hetpeer join",
                exit_code=ExitCode.RUN_CLOSED,
            )
        case "work":
            return LocalError(
                "HP-RUN-021",
                "the run asks for a proof of work",
                why=stop.why,
                fix="use a newer hetpeer, which does it by itself",
                exit_code=ExitCode.VERSION,
            )
        case "crowded":
            return LocalError(
                "HP-RUN-022",
                "the run takes no more volunteers from this network at the moment",
                why=stop.why,
                fix="try again later",
                exit_code=ExitCode.TRY_LATER,
            )
        case _:
            return LocalError(
                "HP-RUN-010",
                "the run has stopped",
                why=stop.why,
                fix="ask the run's author",
                exit_code=ExitCode.RUN_CLOSED,
            )
