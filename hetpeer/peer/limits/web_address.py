"""The address of a daemon's web server, read without loading the server. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from hetpeer.dht.base.errors import ExitCode, LocalError

LOOPBACK, DASHBOARD_PORT = "127.0.0.1", 8787
DASHBOARD_OFF = "off"


@dataclass(frozen=True, slots=True)
class Where:
    """`port` 0: a free one."""

    host: str
    port: int
    or_any: bool = False
    """Whether a free port will do where that one is taken."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine gets there."""
        return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback


def parse_where(text: str) -> Where | None:
    """The address in `[HOST:]PORT`; the default if empty, None for `off`. Raises `LocalError` HP-WEB-002."""
    if text == DASHBOARD_OFF:
        return None
    if not text:
        return Where(LOOPBACK, DASHBOARD_PORT, or_any=True)
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16) or not _is_address(host):
        raise no_dashboard_place(text)
    return Where(host, int(port))


def no_dashboard_place(text: str) -> LocalError:
    """HP-WEB-002: no dashboard can be served at `text`."""
    return LocalError(
        "HP-WEB-002",
        f"{text[:80]!r} is not a place for a dashboard",
        why="it must be a port, or an address of this machine and a port",
        fix="--dashboard 8787 or --dashboard 0.0.0.0:8787; --dashboard off for none",
        exit_code=ExitCode.USAGE,
    )


def _is_address(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
