"""Base of all daemons: state and reason for the owner and for systemd, the owner's orders, and an orderly end
(docs/daemon.md).

`AttendedDaemon` knows two orders, status and stop: a reliable peer or a rendezvous (docs/operations.md).
`serving` takes orders at the control socket, which is made for the daemon's owner alone, and gone with it.
`Notifier` tells systemd about a service of `Type=notify` (sd_notify(3)); without systemd it does nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.dht.base.errors import ExitCode, HetpeerError, LocalError
from hetpeer.dht.base.runtime import SystemClock, TaskSet
from hetpeer.dht.identity.peer_identity import in_use
from hetpeer.peer.control.control_messages import (
    MAX_REQUEST,
    SOCKET,
    ControlRequest,
    DaemonStatus,
    ReliableStatus,
    SettingInForce,
    encode_error,
    not_understood,
    opened,
)
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
        self._unsaved: Callable[[], HetpeerError | None] = lambda: None
        self._change: Callable[[str, str], None] | None = None
        self._settings: Callable[[], dict[str, SettingInForce]] = dict

    def shows(
        self,
        reliable: Callable[[], ReliableStatus],
        unsaved: Callable[[], HetpeerError | None] = lambda: None,
    ) -> None:
        """Show this status of the reliable peer from now on, and why it cannot save something, if so."""
        self._reliable, self._unsaved = reliable, unsaved

    def limited_by(
        self, change: Callable[[str, str], None], settings: Callable[[], dict[str, SettingInForce]]
    ) -> None:
        """Have the owner's `set` done by `change`, which raises `LocalError`, and show `settings`."""
        self._change, self._settings = change, settings

    def answer(self, request: ControlRequest) -> DaemonStatus:
        """Do what the owner asks for. Raises `LocalError` HP-CTL-005 for what it does not do."""
        if request.key is not None and request.value is not None and self._change is not None:
            self._change(request.key, request.value)
        elif request.do not in ("status", "stop"):
            raise LocalError(
                "HP-CTL-005",
                f"a reliable peer or rendezvous does not {request.do}",
                why="only volunteers compute",
                fix="hetpeer stop ends it; what it served goes on when it is started again",
                exit_code=ExitCode.USAGE,
            )
        if request.do == "stop":
            self.stop()
        return self.standing

    @property
    def standing(self) -> DaemonStatus:
        """Status for the owner."""
        unsaved = self._unsaved()
        return super().standing.model_copy(
            update={
                "why": "" if unsaved is None else unsaved.line(),
                "reliable": self._reliable(),
                "settings": self._settings(),
            }
        )


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


# ── the control socket ──────────────────────────────────────────────────────────────────────────────────────


MAX_CONNECTIONS = 16
IDLE_S = 60.0
"""Seconds without a request after which a connection is closed."""
PARTING_S = 1.0
"""Seconds after which a client that does not read its answer is dropped at the end."""
_CREDENTIALS = struct.Struct("3i")


@asynccontextmanager
async def serving(
    home: Path, answer: Callable[[ControlRequest], DaemonStatus], key: Path | None = None
) -> AsyncIterator[None]:
    """Answer the owner at the socket in the existing folder `home`, until the context ends.

    `key`: the daemon's identity, if it is not a volunteer's. Raises `LocalError` HP-ID-002 when another
    daemon serves this home, HP-DISK-001 where no socket can be made.
    """
    async with AsyncExitStack() as stack:
        folder, address = stack.enter_context(locked(home, key))
        with disk_errors(home / SOCKET):
            listening = stack.enter_context(_bound(folder, address))
        connections = _Connections(answer)
        stack.push_async_callback(connections.close)
        server = await asyncio.start_unix_server(connections.serve, sock=listening, limit=MAX_REQUEST)
        stack.callback(server.close)
        yield


@contextmanager
def locked(home: Path, key: Path | None = None) -> Iterator[tuple[int, str]]:
    """`home` as `opened` does, for this process alone; `key` as `serving` has it.

    Raises `LocalError` HP-ID-002 while another one has it, HP-DISK-001.
    """
    with ExitStack() as stack:
        with disk_errors(home / SOCKET):
            folder, address = stack.enter_context(opened(home))
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise in_use(key or home / "identity.key", home) from error
        yield folder, address


@contextmanager
def _bound(folder: int, address: str) -> Iterator[socket.socket]:
    """The socket, with mode 0600 from the start. We hold the lock, so an old one is a killed daemon's."""
    with suppress(FileNotFoundError):
        os.unlink(SOCKET, dir_fd=folder)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(listening.fileno(), 0o600)
        listening.bind(address)
        try:
            yield listening
        finally:
            with suppress(FileNotFoundError):
                os.unlink(SOCKET, dir_fd=folder)
    finally:
        listening.close()


class _Connections:
    """The open connections, one task each."""

    def __init__(self, answer: Callable[[ControlRequest], DaemonStatus]) -> None:
        self._answer = answer
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._open) < MAX_CONNECTIONS and _user_of(writer) == os.getuid():
                self._open[task] = writer
                await self._converse(reader, writer)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            _log.debug("a control connection ended: %r", error)
        finally:
            self._open.pop(task, None)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            async with asyncio.timeout(IDLE_S):
                try:
                    line = await reader.readuntil()
                except asyncio.LimitOverrunError:
                    writer.write(encode_error(not_understood(f"a line of more than {MAX_REQUEST} bytes")))
                    return
                writer.write(self._answered(line))
                await writer.drain()

    def _answered(self, line: bytes) -> bytes:
        try:
            return self._answer(ControlRequest.decode(line)).encode()
        except LocalError as error:
            return encode_error(error)

    async def close(self) -> None:
        """End them all, once what they asked for is on its way."""
        ending = dict(self._open)
        for writer in ending.values():
            writer.close()  # and its reader comes to an end, when the other side has taken all
        if ending:
            _, late = await asyncio.wait(ending, timeout=PARTING_S)
            for task in late:
                ending[task].transport.abort()
        await asyncio.gather(*ending)


def _user_of(writer: asyncio.StreamWriter) -> int:
    """The user id of the process at the other end, as the kernel says."""
    theirs = writer.get_extra_info("socket")
    raw = theirs.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, user, _group = _CREDENTIALS.unpack(raw)
    assert isinstance(user, int)
    return user
