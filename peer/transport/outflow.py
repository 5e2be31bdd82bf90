"""How fast bytes leave a peer while several of its links are busy: what its uplink carries. Pure; times are given.

A link measures what it gets; two that share an uplink get half each only while both have something to send.
"""

from __future__ import annotations

SEVERAL = 2
ENOUGH_S = 1.0
"""Less than this says nothing."""
WINDOW_S = 30.0
"""So much busy time is remembered in full, what was before that ever less."""


class Outflow:
    """Told of every change: `look`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._nbytes = 0.0
        self._links = 0
        self._since = 0.0
        self._arrived = 0

    def look(self, now: float, links: int, arrived: int) -> None:
        """From `now` on, `links` have frames under way; `arrived` bytes have been acknowledged in all."""
        if self._links >= SEVERAL:
            self._seconds += now - self._since
            self._nbytes += max(arrived - self._arrived, 0)  # a link that is closed takes its own along
            if self._seconds > 2 * WINDOW_S:
                self._seconds, self._nbytes = self._seconds / 2, self._nbytes / 2
        self._links, self._since, self._arrived = links, now, arrived

    @property
    def rate(self) -> float:
        """Bytes/s; 0 while too little is known."""
        return self._nbytes / self._seconds if self._seconds >= ENOUGH_S else 0.0
