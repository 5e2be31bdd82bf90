"""The end of a volunteer's life: as its owner wishes, for want of disk, or since the run takes it no more."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from hetpeer.averaging.effects import Stop
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.daemon.owner_wishes import VolunteerDaemon, Wish
from hetpeer.peer.process.console import say
from hetpeer.peer.process.lifecycle import unless
from hetpeer.peer.training.volunteer import Volunteer

FAREWELL_S = 3.0
HAND_OVER_S = 6.0
"""Seconds that a volunteer that stops stays until the state that it alone holds is stored."""
FINISH_HAND_OVER_S = 240.0
"""The same, of a volunteer that was asked to finish."""
FINISH_S = 600.0
"""Most seconds that a volunteer asked to finish waits for the running step."""

NOT_HANDED_OVER = (
    "left before the coordinator confirmed that others have the state of these blocks: "
    "if nobody has it, the run goes back to its last checkpoint (of a grouped run only this pipeline)"
)

_log = logging.getLogger(__name__)


async def called_off(volunteer: Volunteer, daemon: VolunteerDaemon) -> LocalError | None:
    """Return when this life is to end: as the owner wishes, or with the error of a disk without room.

    What we alone hold is stored first, unless the owner takes the machine back or stops us. After an order to
    finish this begins when the current step is over.
    """
    wish = await unless(volunteer.out_of_room(), daemon.until(Wish.PAUSE, Wish.FINISH, Wish.STOP))
    trouble = volunteer.trouble if wish is None else None
    if trouble is not None:
        _log.warning("%s; it hands over what it alone holds, and leaves", trouble.what)
    if wish is Wish.FINISH:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                await unless(daemon.until(Wish.STOP), volunteer.step_over())
    if wish in (Wish.FINISH, None):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_HAND_OVER_S):
                await unless(daemon.until(Wish.STOP), volunteer.session.farewell(FINISH_HAND_OVER_S))
    if wish is Wish.FINISH:
        daemon.stop()
    return trouble


async def say_farewell(volunteer: Volunteer, within_s: float) -> None:
    """Leave, within `within_s` seconds if we alone hold a state; say so if it could not be handed over."""
    session = volunteer.session
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(FAREWELL_S, within_s)):
            await session.farewell(within_s)
    if within_s > 0.0 and volunteer.member.version and not (session.released and session.released.safe):
        say(NOT_HANDED_OVER)


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
