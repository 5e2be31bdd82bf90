"""A volunteer's daemon as its owner sees it: wishes and state (docs/daemon.md).

There is one wish at a time. It follows from the reasons that hold the volunteer back, and from the orders to
finish and to stop. Long work waits for a wish that ends it.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable, Sequence

from hetpeer.dht import discovery
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.peer.control import owned_daemon
from hetpeer.peer.control.control_messages import ControlRequest, DaemonStatus, VolunteerStatus
from hetpeer.peer.control.owned_daemon import Does, Notifier, OwnedDaemon
from hetpeer.peer.limits.governor import Holds, Reason
from hetpeer.peer.process.console import say


class Wish(enum.Enum):
    """Order of the owner to the daemon."""

    WORK = "work"
    PAUSE = "pause"
    FINISH = "finish"
    """Leave with the step that is under way."""
    STOP = "stop"


class DaemonState(enum.StrEnum):
    """State of the daemon, as `status` shows it."""

    STARTING = owned_daemon.STARTING
    CHECKING = discovery.CHECKING
    JOINING = "joining"
    SYNCING = "syncing"
    TRAINING = "training"
    WAITING = "waiting"
    PAUSED = "paused"
    DRAINING = owned_daemon.DRAINING
    STOPPED = owned_daemon.STOPPED
    FAILED = owned_daemon.FAILED


class VolunteerDaemon(OwnedDaemon):
    """The daemon of a volunteer: its holds and orders, and the wish that follows."""

    def __init__(self, clock: SystemClock, leaving: asyncio.Event, notifier: Notifier) -> None:
        super().__init__(clock, leaving, notifier)
        self._holds = Holds()
        self._finishing = False
        self._finish_at = math.inf
        self._changed = asyncio.Event()
        self._figures: Callable[[], VolunteerStatus | None] = lambda: None
        self._explain: Callable[[Sequence[Reason]], str] = lambda _: ""
        self._wish_known = Wish.WORK

    # ── wishes ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def wish(self) -> Wish:
        """The wish in force."""
        held = bool(self.holding)
        if self._leaving.is_set() or (self._finishing and held):
            return Wish.STOP
        if self._finishing:
            return Wish.FINISH
        return Wish.PAUSE if held else Wish.WORK

    @property
    def holding(self) -> tuple[Reason, ...]:
        """Reasons that hold the volunteer back now, in order."""
        return self._holds.at(self._clock.boottime())

    async def until(self, *wishes: Wish) -> Wish:
        """Wait for one of `wishes`; returns it."""
        while (wish := self.wish) not in wishes:
            await self._changed.wait()
        return wish

    def hold(self, reason: Reason, for_s: float = math.inf) -> None:
        """Hold the volunteer back for `reason`, for `for_s` seconds from now on."""
        self._holds.hold(reason, self._clock.boottime() + for_s)
        self.look()

    def release(self, reason: Reason) -> None:
        """End the hold for `reason`."""
        self._holds.release(reason)
        self.look()

    def finish(self) -> None:
        """Leave with the step that is under way."""
        self._finishing = True
        self.look()

    def finish_after(self, seconds: float) -> None:
        """Finish by itself `seconds` from now, including time in which the machine sleeps."""
        self._finish_at = self._clock.boottime() + seconds

    def answer(self, request: ControlRequest) -> DaemonStatus:
        """Do what the owner asks for."""
        match request.do:
            case "pause":
                self.hold(Reason.USER, math.inf if request.for_s is None else request.for_s)
            case "resume":
                self.release(Reason.USER)
            case "finish":
                self.finish()
            case "stop":
                self.stop()
        return self.standing

    # ── state ───────────────────────────────────────────────────────────────────────────────────────────────

    def joined(
        self,
        addresses: Callable[[], Sequence[str]],
        figures: Callable[[], VolunteerStatus | None] = lambda: None,
    ) -> None:
        """Note that the node has joined, at `addresses`; `figures` returns the volunteer's progress."""
        self._figures = figures
        self.ready(addresses)

    def explained_by(self, explain: Callable[[Sequence[Reason]], str]) -> None:
        """Set the function that puts reasons for a hold into words."""
        self._explain = explain

    @property
    def standing(self) -> DaemonStatus:
        """Status for the owner."""
        known, now, wall = super().standing, self._clock.boottime(), self._clock.wall()
        left_s = self._holds.until(now) - now
        is_paused = known.state == DaemonState.PAUSED
        stays = math.isfinite(self._finish_at) and self.wish in (Wish.WORK, Wish.PAUSE)
        return known.model_copy(
            update={
                "why": self._explain(self.holding) if is_paused else "",
                "until": wall + left_s if is_paused and math.isfinite(left_s) else None,
                "ends": wall + self._finish_at - now if stays else None,
                "figures": self._figures(),
            }
        )

    def look(self) -> None:
        """Wake everything that waits for a wish if the wish has changed, then look for a change of state."""
        if not self._finishing and self._clock.boottime() >= self._finish_at:
            self._finishing = True
            say("its time (--for) is over: it leaves when the current step is done")
        wish = self.wish
        if wish is not self._wish_known:
            self._wish_known = wish
            self._changed.set()
            self._changed = asyncio.Event()
            if wish is Wish.STOP:
                self._leaving.set()  # also if a pause ends meanwhile
        super().look()

    def _doing(self) -> Does:
        state, reason = self._look()
        if state in (DaemonState.STOPPED, DaemonState.FAILED) or self.wish is Wish.WORK:
            return state, reason
        if self.wish is Wish.PAUSE:
            return DaemonState.PAUSED, ",".join(self.holding)
        return DaemonState.DRAINING, "finish" if self._finishing else "stop"
