"""Daemons with two orders, status and stop: reliable peers and rendezvous (docs/operations.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.peer.control.control_messages import ControlRequest, DaemonStatus, ReliableStatus
from hetpeer.peer.control.control_server import serving
from hetpeer.peer.control.owned_daemon import OwnedDaemon
from hetpeer.peer.logs.log_files import keeping_log
from hetpeer.peer.process.systemd_notify import Notifier


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
