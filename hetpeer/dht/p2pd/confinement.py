"""Files that p2pd may use: it parses what strangers send, and needs few of its user's files (Landlock)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hetpeer.dht.base import landlock

_READ = ("/etc", "/proc", "/sys", "/usr/share/zoneinfo")
"""Folders of configuration, of the kernel's figures on processes and devices, and of time zones."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_log = logging.getLogger(__name__)


@contextmanager
def confined(binary: Path, identity: Path, sockets: Path) -> Iterator[Callable[[], None]]:
    """Context with a function that the child calls before it runs p2pd.

    From then on it may read `binary`, `identity` and the system's files, change what is in `sockets`, use
    TCP, and signal its own children only. Without Landlock, or with `HETPEER_SANDBOX=off`, the function does
    nothing.
    """
    resolver = Path("/etc/resolv.conf").resolve().parent
    allowed = [(path, landlock.READ) for path in (binary.resolve(), resolver, *map(Path, _READ))]
    allowed += [(identity.resolve(), landlock.READ_FILE), (sockets.resolve(), landlock.CHANGE)]
    allowed += [(Path(name), landlock.READ_FILE | landlock.WRITE_FILE) for name in _DEVICES]
    if os.environ.get(landlock.VARIABLE) == "off":
        yield lambda: None
        return
    try:
        there = [(path, rights) for path, rights in allowed if path.exists()]
        rules = landlock.ruleset(there, tcp=True, others=False)
    except OSError as error:
        _log.info("p2pd can use its user's files: %s", error.strerror)
        yield lambda: None
        return
    try:
        yield lambda: landlock.enter(rules)
    finally:
        os.close(rules)
