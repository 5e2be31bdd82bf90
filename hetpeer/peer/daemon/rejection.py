"""Why a run takes us no more, or not at all, as the error that ends the command."""

from __future__ import annotations

from hetpeer.averaging.effects import Stop
from hetpeer.dht.base.errors import ExitCode, LocalError


def rejection(stop: Stop) -> LocalError:
    """What `stop` means for whoever started us (docs/admission.md)."""
    match stop.rejected:
        case "version":
            return LocalError(
                "HP-RUN-002",
                "the run speaks another version",
                why=stop.why,
                fix="use the version of hetpeer the run was made for",
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
                "the run does not take everybody",
                why=stop.why,
                fix="ask its author for an invite, and give all of it to hetpeer join",
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
                "the run takes no more volunteers of this network now",
                why=stop.why,
                fix="try again later",
                exit_code=ExitCode.TRY_LATER,
            )
        case _:
            return LocalError(
                "HP-RUN-010",
                "the run does not go on",
                why=stop.why,
                fix="ask the run's author",
                exit_code=ExitCode.RUN_CLOSED,
            )
