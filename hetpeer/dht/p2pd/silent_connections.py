"""A limit on TCP connections to p2pd that have not shown who they are: the oldest are ended.

p2pd holds a connection that says nothing for 15 s, and has no limit for them: a stranger without an identity
could take all its open files, and with them every new stream of everybody else. So we look at its sockets in
/proc, and end the oldest of those that p2pd does not know as a peer's. Its descriptors are reached by
pidfd_getfd, which Linux allows for a child of the same user (5.6); where it does not, we say so once.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_UNKNOWN = 128
"""Connections of nobody known that may be open."""
MAX_UNKNOWN_THERE = 32
"""The same from one IP address, once there are too many in all."""
LOOK_S = 1.0
INTRODUCTION_S = 20.0
"""Seconds after which a connection belongs to a peer: p2pd itself has closed all others by then."""
QUIET_S = 60.0
"""Seconds without too many connections after which the next time is logged again."""
_PIDFD_GETFD = 438
_ESTABLISHED = "01"
_LIBC = ctypes.CDLL(None, use_errno=True)

_log = logging.getLogger(__name__)

Socket = tuple[str, int]
"""IP address and port."""


@dataclass(frozen=True, slots=True)
class _Connection:
    inode: int
    descriptor: int
    """Its number in p2pd."""
    remote: Socket


class SilentConnections:
    """The watch on one p2pd. Its methods may run in another thread, one at a time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: dict[int, float] = {}
        """Inode of a socket of p2pd → when it was first seen."""
        self._told_at = float("-inf")
        self._is_refused = False

    def too_many(self) -> bool:
        """Note the sockets that p2pd has now. Returns whether there may be too many new ones."""
        sockets, now = self._sockets(), time.monotonic()
        self._seen = {inode: self._seen.get(inode, now) for inode in sockets}
        new = sum(now - since < INTRODUCTION_S for since in self._seen.values())
        return not self._is_refused and new > MAX_UNKNOWN

    def end_surplus(self, port: int, known: Collection[Socket] | None) -> int:
        """End the oldest unknown connections to `port` that are too many; returns their number.

        `known`: remote ends of peers' connections. None: p2pd cannot say, because its files are used up. Then
        the newest are ended, since the oldest may be peers'.
        """
        now = time.monotonic()
        here = [one for one in self._connections(port) if known is None or one.remote not in known]
        here = [one for one in here if now - self._seen.get(one.inode, now) < INTRODUCTION_S]
        if len(here) <= MAX_UNKNOWN:
            return 0
        there = Counter[str]()
        kept = ended = 0
        for one in sorted(here, key=lambda one: self._age_key(one, now), reverse=known is not None):
            ip = one.remote[0]
            if kept < MAX_UNKNOWN and (known is None or there[ip] < MAX_UNKNOWN_THERE):
                kept += 1
                there[ip] += 1
            elif not self._end(one):
                return ended
            else:
                ended += 1
        if now - self._told_at > QUIET_S:
            _log.warning("%d connections to our port say nothing: most of them are closed", len(here))
        self._told_at = now
        return ended

    def _age_key(self, one: _Connection, now: float) -> tuple[float, int]:
        """Smaller for older connections: of those first seen together, later ones have higher numbers."""
        return self._seen.get(one.inode, now), one.descriptor

    def _sockets(self) -> dict[int, int]:
        """Inode of each socket of p2pd → its descriptor there."""
        folder, found = Path(f"/proc/{self._pid}/fd"), dict[int, int]()
        with suppress(OSError):
            for name in os.listdir(folder):  # noqa: PTH208 - a thousand paths for their names alone
                with suppress(OSError):
                    kind, _, inode = os.readlink(folder / name).partition(":[")  # noqa: PTH115 - as above
                    if kind == "socket":
                        found[int(inode[:-1])] = int(name)
        return found

    def _connections(self, port: int) -> list[_Connection]:
        """Established connections to p2pd's `port`."""
        sockets, found = self._sockets(), []
        for table in ("tcp", "tcp6"):
            with suppress(OSError):
                for line in Path(f"/proc/{self._pid}/net/{table}").read_text().splitlines()[1:]:
                    fields = line.split()
                    local, remote, state, inode = fields[1], fields[2], fields[3], int(fields[9])
                    if state == _ESTABLISHED and _end_of(local)[1] == port and inode in sockets:
                        found.append(_Connection(inode, sockets[inode], _end_of(remote)))
        return found

    def _end(self, one: _Connection) -> bool:
        """Shut a connection down in p2pd, which then closes it. Returns whether the system lets us."""
        try:
            pidfd = os.pidfd_open(self._pid)
        except OSError:
            return False  # it has died
        try:
            descriptor = _LIBC.syscall(_PIDFD_GETFD, pidfd, one.descriptor, 0)
            if descriptor < 0:
                return self._goes_on_after(ctypes.get_errno())
        finally:
            os.close(pidfd)
        with socket.socket(fileno=descriptor) as shared, suppress(OSError):
            if os.fstat(descriptor).st_ino == one.inode:  # else it was closed, and another has its number
                shared.shutdown(socket.SHUT_RDWR)
        return True

    def _goes_on_after(self, error: int) -> bool:
        """Whether to go on after `error`: the connection may just be gone."""
        if error == errno.EBADF:
            return True
        self._is_refused = True
        _log.warning(
            "many connections to our port say nothing, and the system does not let us close them (%s): "
            "if newcomers do not get in, limit connections for each address in the firewall",
            os.strerror(error),
        )
        return False


def _end_of(text: str) -> Socket:
    """IP address and port of an end in /proc/net/tcp: hexadecimal, each word in the machine's byte order."""
    digits, _, port = text.partition(":")
    words = [int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8)]
    packed = b"".join(words)
    if len(packed) == 16 and packed.startswith(bytes(10) + b"\xff\xff"):
        packed = packed[12:]
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed), int(port, 16)
