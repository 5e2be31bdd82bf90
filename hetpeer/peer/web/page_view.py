"""One document with everything on the page: the swarm's status, curves and events, the daemon, the machine.

`you_of` is the part about the volunteer whose daemon serves the page: state, limits, GPU.
"""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpeer.bootstrap.log.loss_curves import Curves, Point
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.peer.daemon.owner_wishes import DaemonState
from hetpeer.peer.limits.nvml import GpuState
from hetpeer.peer.training.volunteer_figures import offload_text
from hetpeer.peer.watching.map_picture import DrawnMap, drawn_map
from hetpeer.peer.watching.status_reader import Onlooker
from hetpeer.peer.watching.swarm_status import Progress, SwarmStatus
from hetpeer.peer.web.machine_load import LoadMeter
from hetpeer.peer.web.machine_warnings import MachineWarning
from hetpeer.peer.web.swarm_events import SwarmEvents

if TYPE_CHECKING:
    from hetpeer.peer.daemon.limits_in_force import LimitsInForce
    from hetpeer.peer.daemon.owner_wishes import VolunteerDaemon
    from hetpeer.peer.daemon.presence import Presence
    from hetpeer.peer.training.volunteer import Volunteer

SCHEMA = "hetpeer.view/1"
CURVES_S = 10.0
"""Seconds between two requests for the loss curves; the newest loss is in the status."""
MAP_S = 3.0
"""Seconds between two maps: adverts come no sooner."""
CREDIT_S = 120.0
"""Seconds after a reading of the metrics in which credit is asked for without watchers, to keep it fresh."""
ANSWER_S = 1.0
"""Seconds that a look waits for the swarm; a later answer is in the next view, and the owner does not wait.
"""
RETRY_S = 3.0
"""Seconds after an unanswered request for the curves, from its end, until the next."""
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
SHOWN = ("limits.", "when.", "compute.offload")
"""Beginnings of the names of the settings on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLimits:
    """Limits on the use of the machine, and the use. Sizes in bytes."""

    settings: Mapping[str, Mapping[str, str]]
    """`section.key` → value and source."""
    month_bytes: int
    """Bytes sent and received in this calendar month."""
    offered: int | None
    """Memory offered, of the GPU if it computes on one; None before a worker is measured."""
    main_memory: int | None
    """Main memory offered beside a GPU."""
    program: int | None
    """Main memory that the program itself takes of the limit."""
    offload: str
    """Where the optimizer of its place is, in words; empty before it has a place."""
    on_gpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class You:
    """The daemon that serves the page, if it takes part."""

    peer: str
    state: str
    reason: str
    why: str
    """The reason of a pause in words."""
    since: float
    """Start of this state, in seconds since 1970."""
    tokens_per_second: float
    microbatches: int
    may: Sequence[str]
    """Orders that the daemon takes now: pause, resume, finish."""
    limits: PageLimits
    gpus: Sequence[GpuState]
    """The GPU in use; before one is in use, all that may be."""


class PageView:
    """Makes views: the swarm by `onlooker`, the daemon's volunteer by `you` (or None), and its `warnings`."""

    def __init__(
        self,
        onlooker: Onlooker,
        machine: LoadMeter,
        you: Callable[[], You | None],
        warnings: Callable[[], Sequence[MachineWarning]] = tuple,
    ) -> None:
        self._onlooker = onlooker
        self._chronicle = SwarmEvents()
        self._machine = machine
        self._you = you
        self._warnings = warnings
        self._curves = Curves()
        self._drawn = 0
        """Checksum of the map: the page asks for a picture that has changed."""
        self._ask_at = self._credit_until = self._draw_at = -math.inf
        self._status: SwarmStatus | None = None
        """The last status."""
        self._map: DrawnMap | None = None
        """The map of the last status that somebody watched."""
        self._tasks = TaskSet()
        self._asking: asyncio.Task[None] | None = None
        self._hurried = asyncio.Event()
        """Set when the daemon itself has changed: the view must not wait for a slow swarm."""
        self._silent_since: float | None = None
        """Time of the first unanswered request to the swarm, in seconds since 1970; None after an answer."""

    def own_credit(self) -> int | None:
        """Credit of this peer at the last look; None if unknown."""
        self._credit_until = time.monotonic() + CREDIT_S
        found = self._status.credit if self._status is not None else None
        return found.yours.credit if found is not None and found.yours is not None else None

    async def look(self, watched: bool) -> dict[str, Any]:
        """The document. Figures from the run's log are renewed only while somebody is `watched` for.

        If the swarm does not answer within ANSWER_S, its part is the last one; daemon and machine are
        current.
        """
        if self._asking is None or self._asking.done():
            self._asking = self._tasks.spawn(self._ask(watched), name="look at the swarm")
        await self._answered(self._asking)
        you, status = self._you(), self._status
        training = self._curves.training
        return {
            "schema": SCHEMA,
            "time": time.time(),
            "silent_since": self._silent_since,
            "status": None if status is None else status.document(),
            "map": self._map and {"words": self._map.words, "drawn": self._drawn},
            "curves": {
                "training": training if status is None else up_to_now(training, status.progress),
                "evaluation": self._curves.evaluation,
                "speed": self._chronicle.speed.points,
            },
            "events": [asdict(event) for event in self._chronicle.events],
            "you": None if you is None else asdict(you),
            "machine": asdict(self._machine.look()),
            "warnings": [asdict(warning) for warning in self._warnings()],
        }

    def picture(self) -> str | None:
        """The newest map of the swarm as SVG; None before there is one."""
        return None if self._map is None else self._map.svg

    async def _draw(self, status: SwarmStatus) -> None:
        """Draw the map anew, in a thread: some hundred peers take a tenth of a second."""
        you, before = self._you(), None if self._map is None else self._map.points
        own = "" if you is None else you.peer
        self._map = drawn = await asyncio.to_thread(drawn_map, status, own, before)
        self._drawn = zlib.crc32(drawn.svg.encode())

    def hurry(self) -> None:
        """Let the current or next look not wait for the swarm: the daemon has changed."""
        self._hurried.set()

    async def _answered(self, asking: asyncio.Task[None]) -> None:
        hurried = asyncio.ensure_future(self._hurried.wait())
        try:
            await asyncio.wait({asking, hurried}, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurried.cancel()
        self._hurried.clear()

    async def close(self) -> None:
        """Cancel requests to the swarm."""
        await self._tasks.close()

    async def _ask(self, watched: bool) -> None:
        """Ask the swarm for its status. Raises `RemoteError` if it does not answer."""
        self._silent_since = self._silent_since or time.time()
        ranked = watched or time.monotonic() < self._credit_until
        self._status = status = await self._onlooker.status(ranked=ranked)
        self._silent_since = None
        self._chronicle.add(status)
        if watched and time.monotonic() >= self._draw_at:
            await self._draw(status)
            self._draw_at = time.monotonic() + MAP_S
        if watched and time.monotonic() >= self._ask_at:
            found = await self._onlooker.curves()
            self._curves = found or self._curves
            self._ask_at = time.monotonic() + (CURVES_S if found else RETRY_S)


def up_to_now(curve: Sequence[Point], progress: Progress) -> Sequence[Point]:
    """The training curve of the log, with the loss in the status added if it is newer."""
    if progress.loss is None or (curve and progress.step <= curve[-1][0]):
        return curve
    return [*curve, (progress.step, progress.loss)]


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
            offered=volunteer.offer.memory.device if volunteer is not None else None,
            main_memory=volunteer.offer.memory.host if volunteer is not None else None,
            program=volunteer.offer.main.program if volunteer is not None else None,
            offload=_offload(volunteer),
            on_gpu=volunteer is not None and volunteer.offer.memory.apart,
        ),
        gpus=readings.gpus if readings is not None else (),
    )


def _offload(volunteer: Volunteer | None) -> str:
    if volunteer is None or volunteer.offload is None:
        return ""
    return offload_text(volunteer.offload.kind, apart=volunteer.offer.memory.apart)


def _shown(governing: LimitsInForce) -> dict[str, dict[str, str]]:
    """Settings and sources; of a file only its name, because other users of this machine may see the page."""
    return {
        key: {
            "value": one.value,
            "source": Path(one.source).name if one.source.startswith("/") else one.source,
        }
        for key, one in governing.told.items()
        if key.startswith(SHOWN)
    }
