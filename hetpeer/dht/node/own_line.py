"""Our own line: whether p2pd's connections can still carry anything. Pure but for the two functions below.

After a new lease this machine has another address. Connections from the former one hear nothing any more, but
p2pd takes minutes to give them up. So it is started again when it has such connections. Behind a router that
got another address our own stays; then nothing at all is heard. That counts only at peers that many others
call: elsewhere it may be the only other peer that is away.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from ipaddress import ip_address

LINE_LOOK_S = 0.5
"""Seconds between two looks; an address counts as gone after two of them."""
SILENCE_S = 6.0
"""Seconds without a byte although streams are open: less than a lease, and channels beat every second."""
LONGEST_S = 120.0
"""Longest time between two restarts while nothing is heard; it doubles each time."""


class OwnLine:
    """Judges the line by what is seen at each look. `silence_counts`: silence tells that it is dead."""

    def __init__(self, *, silence_counts: bool) -> None:
        self._silence_counts = silence_counts
        self._here: frozenset[str] | None = None
        self._missing: frozenset[str] = frozenset()
        """Addresses that the last look did not find any more."""
        self._heard = -1
        self._heard_at = 0.0
        self._patience_s = SILENCE_S

    def left(self, addresses: Collection[str]) -> frozenset[str]:
        """Addresses that this machine has had and does not have any more, by the present ones."""
        now, before = frozenset(addresses), self._here or frozenset()
        gone = self._missing - now
        self._missing = before - now
        self._here = now
        return gone

    def silent(self, now: float, heard: int, streams: int) -> bool:
        """Whether the line is dead: nothing came for long, though `streams` of others are open.

        `heard`: bytes from others so far.
        """
        if heard != self._heard or not streams:
            if heard != self._heard:
                self._patience_s = SILENCE_S
            self._heard, self._heard_at = heard, now
            return False
        if not self._silence_counts or now - self._heard_at < self._patience_s:
            return False
        self._heard_at = now
        self._patience_s = min(2 * self._patience_s, LONGEST_S)
        return True


def machine_addresses() -> set[str]:
    """IP addresses of this machine, without those that only this machine or its own network cable knows."""
    import psutil

    entries = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    return {ip for entry in entries if (ip := _known_beyond(entry.address))}


@lru_cache(256)
def _known_beyond(address: str) -> str:
    """The IP address if others can know it, else empty. This is asked twice a second, of the same few."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:  # of a network card
        return ""
    return "" if ip.is_loopback or ip.is_link_local else str(ip)


def talks_from(pid: int, addresses: Collection[str]) -> str:
    """One of `addresses` from which the process `pid` has connections; empty if there are none."""
    import psutil

    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.AccessDenied:
        return min(addresses, default="")
    except psutil.Error:  # it has just ended
        return ""
    used = {entry.laddr.ip.removeprefix("::ffff:") for entry in connections if entry.laddr and entry.raddr}
    return min(used.intersection(addresses), default="")
