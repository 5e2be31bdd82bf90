"""Notifications to systemd for a service of `Type=notify` (sd_notify(3)); none without systemd."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

ADDRESS = "NOTIFY_SOCKET"

_log = logging.getLogger(__name__)


def is_service() -> bool:
    """Whether systemd has started this process as a service: its output then goes to the journal, which
    others may read.
    """
    return bool(os.environ.get(ADDRESS))


class Notifier:
    """`address` is NOTIFY_SOCKET: a path, or a name that begins with @; empty: nothing is ever sent."""

    def __init__(self, address: str, watchdog_s: float | None = None) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog_s = watchdog_s if address else None
        """The service counts as hung when it has not said WATCHDOG=1 for so long."""

    @classmethod
    def of_environment(cls) -> Notifier:
        """The notifier for the socket that systemd has given this process."""
        usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
        ours = usec.isdecimal() and int(usec) > 0 and pid in ("", str(os.getpid()))
        return cls(os.environ.get(ADDRESS, ""), int(usec) / 1e6 if ours else None)

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
