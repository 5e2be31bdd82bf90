"""Base of all daemons: state and reason for the owner and for systemd, and an orderly end
(docs/daemon.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from hetpeer.dht.base.errors import HetpeerError
from hetpeer.dht.base.runtime import SystemClock, TaskSet
from hetpeer.peer.control.control_messages import DaemonStatus
from hetpeer.peer.process.systemd_notify import Notifier

TICK_S = 1.0
"""Seconds between two looks at what changes with time alone."""
MAX_ADDRESSES = 8
STARTING, DRAINING, STOPPED, FAILED = "starting", "draining", "stopped", "failed"
"""States that every daemon has at its start and its end."""

Does = tuple[str, str]
"""A state and the reason for it, which may be empty."""


class OwnedDaemon:
    """`leaving` is set by a signal, and by `stop`. To be used within `running`."""

    def __init__(self, clock: SystemClock, leaving: asyncio.Event, notifier: Notifier) -> None:
        self._clock = clock
        self._leaving = leaving
        self._notifier = notifier
        self._look: Callable[[], Does] = lambda: (STARTING, "")
        self._addresses: Callable[[], Sequence[str]] = tuple
        self._dashboard = ""
        self._changes: Callable[[], None] = lambda: None
        self._known: tuple[str, str, float] = (STARTING, "", clock.wall())
        self._parting = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep time, and hear signals. An error that ends it is told to systemd."""
        tasks = TaskSet()
        tasks.spawn(self._hear_signals(), name="signals")
        tasks.spawn(self._keep_time(), name="time")
        tasks.spawn(self._notifier.watch_forever(), name="watchdog")
        try:
            yield
            self.does(STOPPED)
        except HetpeerError as error:
            self.does(FAILED, error.code)
            raise
        finally:
            await tasks.close()

    def stop(self) -> None:
        """Leave now."""
        self._leaving.set()
        self.look()

    def does(self, state: str, reason: str = "") -> None:
        """Set state and reason until the next call of `does` or `follow`."""
        self.follow(lambda: (state, reason))

    def follow(self, look: Callable[[], Does]) -> None:
        """`look` says what it does, until something else is said."""
        self._look = look
        self.look()

    def ready(self, addresses: Callable[[], Sequence[str]]) -> None:
        """Tell systemd that the daemon is ready; `addresses` gives those of its node."""
        self._addresses = addresses
        self._notifier.tell("READY")

    def shown_at(self, link: str, changes: Callable[[], None] = lambda: None) -> None:
        """Set the link to its dashboard; empty: none. `changes` is called at each change of state or
        reason.
        """
        self._dashboard, self._changes = link, changes

    @property
    def standing(self) -> DaemonStatus:
        """Status for the owner."""
        self.look()
        state, reason, since = self._known
        return DaemonStatus(
            state=state,
            reason=reason,
            since=since,
            addresses=tuple(self._addresses()[:MAX_ADDRESSES]),
            dashboard=self._dashboard or None,
        )

    def look(self) -> None:
        """Something may have changed: systemd hears of it."""
        if self._leaving.is_set() and not self._parting:
            self._parting = True
            self._notifier.tell("STOPPING")
        state, reason = self._doing()
        if (state, reason) != self._known[:2]:
            self._known = (state, reason, self._clock.wall())
            self._notifier.tell("STATUS", f"{state} ({reason})" if reason else state)
            self._changes()

    def _doing(self) -> Does:
        state, reason = self._look()
        if self._leaving.is_set() and state not in (STOPPED, FAILED):
            return DRAINING, "stop"
        return state, reason

    async def _hear_signals(self) -> None:
        await self._leaving.wait()
        self.look()

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.look()
