"""A volunteer's daemon as its owner sees it: what is asked of it, and what it does (docs/daemon.md).

What is asked is one wish at a time. It follows from what holds the volunteer back, from whether it is to finish and whether it
is to stop; who does something that takes long waits for a wish that ends it.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from hetpeer.dht.clock import SystemClock
from hetpeer.dht.errors import HetpeerError
from hetpeer.dht.tasks import TaskSet
from hetpeer.peer.console import say
from hetpeer.peer.control.wire import Figures, Request, Standing
from hetpeer.peer.daemon.holds import Holds, Reason
from hetpeer.peer.notify import Notifier

TICK_S = 1.0
"""Between two looks at the clock: a pause that ends by itself is so late at most."""
MAX_ADDRESSES = 8


class Wish(enum.Enum):
    """What the owner wants."""

    WORK = "work"
    PAUSE = "pause"
    FINISH = "finish"
    """Leave with the step that is under way."""
    STOP = "stop"


class State(enum.StrEnum):
    """What the daemon does, as `status` shows it."""

    STARTING = "starting"
    CHECKING = "checking"
    JOINING = "joining"
    SYNCING = "syncing"
    TRAINING = "training"
    WAITING = "waiting"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


Does = tuple[State, str]
"""A state and the reason for it, which may be empty."""


class Daemon:
    """`leaving` is set by a signal, and by `stop`. To be used within `running`."""

    def __init__(self, clock: SystemClock, leaving: asyncio.Event, notifier: Notifier) -> None:
        self._clock = clock
        self._leaving = leaving
        self._notifier = notifier
        self._holds = Holds()
        self._finishing = False
        self._finish_at = math.inf
        self._changed = asyncio.Event()
        self._look: Callable[[], Does] = lambda: (State.STARTING, "")
        self._addresses: Callable[[], Sequence[str]] = tuple
        self._figures: Callable[[], Figures | None] = lambda: None
        self._dashboard = ""
        self._explain: Callable[[Sequence[Reason]], str] = lambda _: ""
        self._known: tuple[State, str, float] = (State.STARTING, "", clock.wall())
        self._wish_known = Wish.WORK

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep time, and hear signals. An error that ends it is told to systemd."""
        tasks = TaskSet()
        tasks.spawn(self._hear_signals(), name="signals")
        tasks.spawn(self._keep_time(), name="time")
        tasks.spawn(self._notifier.watch_forever(), name="watchdog")
        try:
            yield
            self.does(State.STOPPED)
        except HetpeerError as error:
            self.does(State.FAILED, error.code)
            raise
        finally:
            await tasks.close()

    # ── what is asked ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def wish(self) -> Wish:
        """What the owner wants now."""
        held = bool(self.holding)
        if self._leaving.is_set() or (self._finishing and held):
            return Wish.STOP
        if self._finishing:
            return Wish.FINISH
        return Wish.PAUSE if held else Wish.WORK

    @property
    def holding(self) -> tuple[Reason, ...]:
        """What holds it back now, in order."""
        return self._holds.at(self._clock.boottime())

    async def until(self, *wishes: Wish) -> Wish:
        """Wait for one of `wishes`; returns it."""
        while (wish := self.wish) not in wishes:
            await self._changed.wait()
        return wish

    def hold(self, reason: Reason, for_s: float = math.inf) -> None:
        """Hold the volunteer back, for so long from now on."""
        self._holds.hold(reason, self._clock.boottime() + for_s)
        self.look()

    def release(self, reason: Reason) -> None:
        """`reason` holds it back no more."""
        self._holds.release(reason)
        self.look()

    def finish(self) -> None:
        """Leave with the step that is under way."""
        self._finishing = True
        self.look()

    def finish_after(self, seconds: float) -> None:
        """Finish by itself so long from now on; time in which the machine sleeps counts."""
        self._finish_at = self._clock.boottime() + seconds

    def stop(self) -> None:
        """Leave now."""
        self._leaving.set()
        self.look()

    def answer(self, request: Request) -> Standing:
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

    # ── what it does ─────────────────────────────────────────────────────────────────────────────────────────────

    def does(self, state: State, reason: str = "") -> None:
        """It does this, until something else is said."""
        self.follow(lambda: (state, reason))

    def follow(self, look: Callable[[], Does]) -> None:
        """`look` says what it does, until something else is said."""
        self._look = look
        self.look()

    def joined(
        self, addresses: Callable[[], Sequence[str]], figures: Callable[[], Figures | None] = lambda: None
    ) -> None:
        """It is in the network, and reached there; `figures` are what it has to show from now on."""
        self._addresses, self._figures = addresses, figures
        self._notifier.tell("READY")

    def explained_by(self, explain: Callable[[Sequence[Reason]], str]) -> None:
        """`explain` says in words what holds it."""
        self._explain = explain

    def shown_at(self, link: str) -> None:
        """Its dashboard is there, from now on; empty: nowhere."""
        self._dashboard = link

    @property
    def standing(self) -> Standing:
        """For the owner."""
        self.look()
        state, reason, since = self._known
        now = self._clock.boottime()
        left_s = self._holds.until(now) - now
        ends = state is State.PAUSED and math.isfinite(left_s)
        stays = math.isfinite(self._finish_at) and self.wish in (Wish.WORK, Wish.PAUSE)
        return Standing(
            state=state,
            reason=reason,
            why=self._explain(self.holding) if state is State.PAUSED else "",
            since=since,
            until=self._clock.wall() + left_s if ends else None,
            ends=self._clock.wall() + self._finish_at - now if stays else None,
            addresses=tuple(self._addresses()[:MAX_ADDRESSES]),
            figures=self._figures(),
            dashboard=self._dashboard or None,
        )

    def look(self) -> None:
        """Something may have changed: whoever waits for a wish, and systemd, hear of it."""
        wish = self.wish
        if wish is not self._wish_known:
            self._wish_known = wish
            self._changed.set()
            self._changed = asyncio.Event()
            if wish is Wish.STOP:
                self._leaving.set()  # also if a pause ends meanwhile
                self._notifier.tell("STOPPING")
        state, reason = self._doing(wish)
        if (state, reason) != self._known[:2]:
            self._known = (state, reason, self._clock.wall())
            self._notifier.tell("STATUS", f"{state} ({reason})" if reason else state)

    def _doing(self, wish: Wish) -> Does:
        state, reason = self._look()
        if state in (State.STOPPED, State.FAILED) or wish is Wish.WORK:
            return state, reason
        if wish is Wish.PAUSE:
            return State.PAUSED, ",".join(self.holding)
        return State.DRAINING, "finish" if self._finishing else "stop"

    async def _hear_signals(self) -> None:
        await self._leaving.wait()
        self.look()

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if not self._finishing and self._clock.boottime() >= self._finish_at:
                say("its time is over: it leaves with the step that is under way")
                self.finish()
            self.look()
