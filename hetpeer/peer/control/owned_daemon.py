"""Base of all daemons: state and reason for the owner and for systemd, and an orderly end (docs/daemon.md).

`AttendedDaemon` knows two orders, status and stop: a reliable peer or a rendezvous (docs/operations.md).
`Notifier` tells systemd about a service of `Type=notify` (sd_notify(3)); without systemd it does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from hetpeer.dht.base.errors import ExitCode, HetpeerError, LocalError
from hetpeer.dht.base.runtime import SystemClock, TaskSet
from hetpeer.peer.control.control_messages import ControlRequest, DaemonStatus, ReliableStatus
from hetpeer.peer.control.control_server import serving
from hetpeer.peer.process.log_files import keeping_log

NOTIFY_SOCKET = "NOTIFY_SOCKET"
TICK_S = 1.0
"""Seconds between two looks at what changes with time alone."""
MAX_ADDRESSES = 8
STARTING, DRAINING, STOPPED, FAILED = "starting", "draining", "stopped", "failed"
"""States that every daemon has at its start and its end."""

_log = logging.getLogger(__name__)


def is_service() -> bool:
    """Whether systemd started this process as a service, with output to the journal that others may read."""
    return bool(os.environ.get(NOTIFY_SOCKET))


class Notifier:
    """`address` is NOTIFY_SOCKET: a path, or a name that begins with @; empty: nothing is ever sent."""

    def __init__(self, address: str, watchdog_s: float | None = None) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog_s = watchdog_s if address else None
        """Seconds without WATCHDOG=1 after which systemd counts the service as hung; None: never."""

    @classmethod
    def of_environment(cls) -> Notifier:
        """The notifier for the socket that systemd has given this process."""
        usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
        ours = usec.isdecimal() and int(usec) > 0 and pid in ("", str(os.getpid()))
        return cls(os.environ.get(NOTIFY_SOCKET, ""), int(usec) / 1e6 if ours else None)

    async def watch_forever(self) -> None:
        """Say that the loop runs, twice as often as is asked for; returns if it is not."""
        while self.watchdog_s is not None:
            self.tell("WATCHDOG")
            await asyncio.sleep(self.watchdog_s / 2)

    def tell(self, word: str, value: str = "1") -> None:
        """Send `word=value`. A systemd that does not take it changes nothing for us."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as there:
                there.sendto(f"{word}={value}".replace("\n", " ").encode(), self._address)
        except OSError as error:
            _log.debug("systemd was not told %s: %s", word, error)


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
        """Set the link to its dashboard; empty: none. `changes` is called when state or reason changes."""
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
        """Compare the state with the last known one; report a change to systemd and the dashboard."""
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


class AttendedDaemon(OwnedDaemon):
    """The daemon of a reliable peer once `shows` was called, else of a rendezvous."""

    def __init__(self, clock: SystemClock, leaving: asyncio.Event, notifier: Notifier) -> None:
        super().__init__(clock, leaving, notifier)
        self._reliable: Callable[[], ReliableStatus | None] = lambda: None

    def shows(self, reliable: Callable[[], ReliableStatus]) -> None:
        """Show this status of the reliable peer from now on."""
        self._reliable = reliable

    def answer(self, request: ControlRequest) -> DaemonStatus:
        """Do what the owner asks for. Raises `LocalError` HP-CTL-005 for what it does not do."""
        if request.do not in ("status", "stop"):
            raise LocalError(
                "HP-CTL-005",
                f"a reliable peer or rendezvous does not {request.do}",
                why="only volunteers compute, and have limits",
                fix="hetpeer stop ends it; what it served goes on when it is started again",
                exit_code=ExitCode.USAGE,
            )
        if request.do == "stop":
            self.stop()
        return self.standing

    @property
    def standing(self) -> DaemonStatus:
        """Status for the owner."""
        return super().standing.model_copy(update={"reliable": self._reliable()})


@asynccontextmanager
async def attended(folder: Path, key: Path, leaving: asyncio.Event) -> AsyncIterator[AttendedDaemon]:
    """Run a daemon in the existing `folder` with the identity of `key`, until `leaving` is set: control
    socket, systemd, log.

    Raises `LocalError` HP-ID-002 while another daemon lives there, HP-DISK-001, HP-DISK-002.
    """
    daemon = AttendedDaemon(SystemClock(), leaving, Notifier.of_environment())
    async with daemon.running(), serving(folder, daemon.answer, key):
        with keeping_log(folder):
            yield daemon
