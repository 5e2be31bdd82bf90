"""How fast bytes leave a peer while several of its links are busy: what its uplink carries. Pure; times are given.

A link measures what it gets; two that share an uplink get half each only while both have something to send. And a line that is busy is not always full: what it
carries is what it carried at its best, not in the middle. Where frames are few and small it never is: what is measured then is how long a word takes there and back.
So a window counts only if what was under way in it had to wait for the line, and a burst only from its first acknowledgement on.
"""

from __future__ import annotations

from collections import deque

SEVERAL = 2
WINDOW_S, ARRIVALS = 1.0, 24
"""A window is closed after so much busy time, and so many acknowledgements: what is half-way at its ends is little then."""
FULL, ACK_S = 2.0, 0.05
"""A line is full if bytes are under way for so many times as long as a word there and back, and an acknowledgement that waits for a frame to travel with."""
WINDOWS, KNOWN, SEEN = 16, 8, 2
"""So many are remembered; the best quarter counts, without what is above it by chance. With fewer than `KNOWN` nothing does: whoever is paced to a line that was taken
for half as fast keeps to that, and finds out only little by little.
"""


class UplinkRate:
    """Told of every change: `look`."""

    def __init__(self) -> None:
        self._windows: deque[float] = deque(maxlen=WINDOWS)
        self._begin()
        self._links = 0
        self._flows = False
        """Something has arrived since several links are busy."""
        self._since = 0.0
        self._arrived = 0
        self._waiting = 0

    def _begin(self) -> None:
        self._seconds = self._byte_seconds = 0.0
        self._nbytes = self._arrivals = 0

    def look(self, now: float, links: int, arrived: int, waiting: int, trip_s: float) -> None:
        """From `now` on, `links` have `waiting` bytes under way; `arrived` bytes have been acknowledged in all. `trip_s`: there and back on the middle one of those links, at best."""
        came = max(arrived - self._arrived, 0)  # a link that is closed takes its own along
        if self._links >= SEVERAL and self._flows:
            self._seconds += now - self._since
            self._byte_seconds += (now - self._since) * self._waiting
            self._nbytes += came
            self._arrivals += came > 0
            if self._seconds >= WINDOW_S and self._arrivals >= ARRIVALS:
                if self._byte_seconds >= FULL * (trip_s + ACK_S) * self._nbytes:
                    self._windows.append(self._nbytes / self._seconds)
                self._begin()
        self._flows = min(links, self._links) >= SEVERAL and (self._flows or came > 0)
        self._links, self._since, self._arrived, self._waiting = links, now, arrived, waiting

    @property
    def rate(self) -> float:
        """Bytes/s; 0 while too little is known."""
        return self._best() if len(self._windows) >= KNOWN else 0.0

    @property
    def seen(self) -> float:
        """Bytes/s; 0 before `SEEN` windows. For people and planners: a guess that is too low slows nobody down there."""
        return self._best() if len(self._windows) >= SEEN else 0.0

    def _best(self) -> float:
        best = sorted(self._windows, reverse=True)
        return best[max((len(best) - 1) // 4, 1)]
