"""The owner's end of the control socket, for the command line: nothing here waits for long."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.control.control_messages import (
    MAX_ANSWER,
    ControlRequest,
    DaemonStatus,
    decode_answer,
    opened,
)

ANSWER_S = 5.0


class ControlConnection:
    """Connection to a daemon. Raises `LocalError` HP-CTL-001 when it ends, HP-CTL-002 if it stays silent."""

    def __init__(self, home: Path, there: socket.socket) -> None:
        self._home = home
        self._there = there

    def ask(self, request: ControlRequest) -> DaemonStatus:
        """The daemon's answer. Raises also the error in the answer, and HP-CTL-003."""
        try:
            self._there.sendall(request.encode())
            line = bytearray()
            while not line.endswith(b"\n"):
                some = self._there.recv(MAX_ANSWER)
                if not some:
                    raise not_running(self._home, "it has just ended")
                line += some
                if len(line) > MAX_ANSWER:
                    break
        except TimeoutError as error:
            raise LocalError(
                "HP-CTL-002",
                f"the hetpeer daemon of {self._home} does not answer",
                why=f"no answer in {ANSWER_S:.0f} s: it is frozen, or the machine is short of memory",
                fix="try again, or end its process (kill)",
            ) from error
        except ConnectionError as error:
            raise not_running(self._home, "it has just ended") from error
        return decode_answer(bytes(line))

    def ended(self, within_s: float) -> bool:
        """Wait until the daemon has ended; whether it did."""
        self._there.settimeout(within_s)
        try:
            return not self._there.recv(1)
        except TimeoutError:
            return False
        except ConnectionError:
            return True


@contextmanager
def connected(home: Path) -> Iterator[ControlConnection]:
    """A connection to the daemon that runs from `home`. Raises `LocalError` HP-CTL-001 when there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as there:
        there.settimeout(ANSWER_S)
        try:
            with opened(home) as (_, address):
                there.connect(address)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise not_running(home, "none was started, or it has ended") from error
        except OSError as error:
            raise not_running(home, f"{error.strerror or error}") from error
        yield ControlConnection(home, there)


def ask(home: Path, request: ControlRequest) -> DaemonStatus:
    """Ask one question on a connection of its own. Raises as `connected` and `ControlConnection.ask` do."""
    with connected(home) as connection:
        return connection.ask(request)


def not_running(home: Path, why: str) -> LocalError:
    """HP-CTL-001."""
    return LocalError(
        "HP-CTL-001",
        f"no hetpeer daemon runs from {home}",
        why=why,
        fix="start one with hetpeer join, or give the right folder with --home (for a reliable peer: its run"
        " directory)",
        exit_code=ExitCode.NOT_RUNNING,
    )
