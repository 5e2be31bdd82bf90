"""All that the page shows at one moment, as one document: the swarm's status, curves and events, the daemon, the machine."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetpeer.bootstrap.log.loss_curves import Curves, Point
from hetpeer.dht.base.task_set import TaskSet
from hetpeer.peer.limits.nvml import GpuState
from hetpeer.peer.watching.status_reader import Onlooker
from hetpeer.peer.watching.swarm_status import Progress, SwarmStatus
from hetpeer.peer.web.machine_load import LoadMeter
from hetpeer.peer.web.machine_warnings import MachineWarning
from hetpeer.peer.web.swarm_events import SwarmEvents

SCHEMA = "hetpeer.view/1"
CURVES_S = 10.0
"""Between two questions for the loss curves; the newest loss is in the status."""
CREDIT_S = 120.0
"""So long after the metrics were read, credit is asked for though nobody watches: who reads them now and then has it new."""
ANSWER_S = 1.0
"""So long the swarm is waited for at each look; what it says later is in the next one, and the owner is not kept waiting."""
RETRY_S = 3.0
"""After one that nobody has answered, counted from its end: who is gone is not waited for at each look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLimits:
    """What it may take of its machine, and what of that is taken. Sizes are bytes."""

    settings: Mapping[str, Mapping[str, str]]
    """`section.key` → value and source, as people write them."""
    month_bytes: int
    """Sent and received in this month of the calendar."""
    offered: int | None
    """Memory, of the GPU if it computes on one; None while no worker is measured."""
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
    """In this state, in seconds since 1970."""
    tokens_per_second: float
    microbatches: int
    may: Sequence[str]
    """What it can be asked for now: pause, resume, finish."""
    limits: PageLimits
    gpus: Sequence[GpuState]
    """Those that it computes on, or may."""


class PageView:
    """Looks through `onlooker`; `you` says how the daemon itself is, None of one that does not take part, `warnings` what is wrong with it."""

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
        self._ask_at = self._credit_until = -math.inf
        self._status: SwarmStatus | None = None
        """The last one."""
        self._tasks = TaskSet()
        self._asking: asyncio.Task[None] | None = None
        self._hurried = asyncio.Event()
        """The daemon itself has changed, which nobody is to learn later because the swarm is slow."""
        self._silent_since: float | None = None
        """When the swarm was asked, while it has not answered since; in seconds since 1970."""

    def own_credit(self) -> int | None:
        """What our peer has, as was said at the last look."""
        self._credit_until = time.monotonic() + CREDIT_S
        found = self._status.credit if self._status is not None else None
        return found.yours.credit if found is not None and found.yours is not None else None

    async def look(self, watched: bool) -> dict[str, Any]:
        """The document. Unless somebody watches, what the run's log says is as it was.

        What is known of the swarm is from before where it does not answer within ANSWER_S; the daemon and the machine are as they are now.
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

    def hurry(self) -> None:
        """The daemon has just changed: the look that is under way, or the next one, does not wait for the swarm."""
        self._hurried.set()

    async def _answered(self, asking: asyncio.Task[None]) -> None:
        hurried = asyncio.ensure_future(self._hurried.wait())
        try:
            await asyncio.wait({asking, hurried}, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurried.cancel()
        self._hurried.clear()

    async def close(self) -> None:
        """Ask nobody any more."""
        await self._tasks.close()

    async def _ask(self, watched: bool) -> None:
        """How the swarm is. Raises `RemoteError` when it does not answer."""
        self._silent_since = self._silent_since or time.time()
        ranked = watched or time.monotonic() < self._credit_until
        self._status = status = await self._onlooker.status(ranked=ranked)
        self._silent_since = None
        self._chronicle.add(status)
        if watched and time.monotonic() >= self._ask_at:
            found = await self._onlooker.curves()
            self._curves = found or self._curves
            self._ask_at = time.monotonic() + (CURVES_S if found else RETRY_S)


def up_to_now(curve: Sequence[Point], progress: Progress) -> Sequence[Point]:
    """The training loss as the log had it some seconds ago, and as it is said to be now, if that is newer."""
    if progress.loss is None or (curve and progress.step <= curve[-1][0]):
        return curve
    return [*curve, (progress.step, progress.loss)]
