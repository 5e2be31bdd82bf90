"""The volunteer whose daemon serves the page, for the page: state, limits, GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetpeer.peer.daemon.owner_wishes import DaemonState
from hetpeer.peer.web.page_view import PageLimits, You

if TYPE_CHECKING:
    from hetpeer.peer.daemon.limits_in_force import LimitsInForce
    from hetpeer.peer.daemon.owner_wishes import VolunteerDaemon
    from hetpeer.peer.daemon.presence import Presence

AT_WORK = frozenset(
    {
        DaemonState.STARTING,
        DaemonState.CHECKING,
        DaemonState.JOINING,
        DaemonState.SYNCING,
        DaemonState.TRAINING,
        DaemonState.WAITING,
    }
)
LIMITS = ("limits", "when")
"""Sections of the settings on the page."""


def you_of(presence: Presence, daemon: VolunteerDaemon, governing: LimitsInForce) -> You:
    """The volunteer's current view."""
    standing, volunteer = daemon.standing, presence.life.volunteer
    may: tuple[str, ...] = ()
    if standing.state == DaemonState.PAUSED:
        may = ("resume", "finish")
    elif standing.state in AT_WORK:
        may = ("pause", "finish")
    readings = governing.readings
    return You(
        peer=presence.node.peer_id,
        state=standing.state,
        reason=standing.reason,
        why=standing.why,
        since=standing.since,
        tokens_per_second=volunteer.tokens_per_second if volunteer is not None else 0.0,
        microbatches=volunteer.figures.microbatches if volunteer is not None else 0,
        may=may,
        limits=PageLimits(
            settings=_shown(governing),
            month_bytes=governing.month_bytes,
            offered=volunteer.offer.memory_bytes if volunteer is not None else None,
            on_gpu=volunteer is not None and not volunteer.offer.in_ram,
        ),
        gpus=readings.gpus if readings is not None else (),
    )


def _shown(governing: LimitsInForce) -> dict[str, dict[str, str]]:
    """Settings and sources; of a file only its name, because other users of this machine may see the page."""
    return {
        key: {
            "value": one.value,
            "source": Path(one.source).name if one.source.startswith("/") else one.source,
        }
        for key, one in governing.told.items()
        if key.partition(".")[0] in LIMITS
    }
