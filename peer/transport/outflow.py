"""How fast bytes leave a peer while several of its links are busy: what its uplink carries. Pure; times are given.

A link measures what it gets; two that share an uplink get half each only while both have something to send. And a line that is busy is not always full: what it
carries is what it carried at its best, not in the middle.
"""

from __future__ import annotations

from collections import deque

SEVERAL = 2
WINDOW_S, ARRIVALS = 1.0, 24
"""A window is closed after so much busy time, and so many acknowledgements: what is half-way at its ends is little then."""
WINDOWS, KNOWN, SEEN = 16, 8, 2
"""So many are remembered; the best quarter counts, without what is above it by chance. With fewer than `KNOWN` nothing does: whoever is paced to a line that was taken
for half as fast keeps to that, and finds out only little by little.
"""


class Outflow:
    """Told of every change: `look`."""

    def __init__(self) -> None:
        self._windows: deque[float] = deque(maxlen=WINDOWS)
        self._seconds = 0.0
        self._nbytes = 0
        self._arrivals = 0
        self._links = 0
        self._since = 0.0
        self._arrived = 0

    def look(self, now: float, links: int, arrived: int) -> None:
        """From `now` on, `links` have frames under way; `arrived` bytes have been acknowledged in all."""
        if self._links >= SEVERAL:
            came = max(arrived - self._arrived, 0)  # a link that is closed takes its own along
            self._seconds += now - self._since
            self._nbytes += came
            self._arrivals += came > 0
            if self._seconds >= WINDOW_S and self._arrivals >= ARRIVALS:
                self._windows.append(self._nbytes / self._seconds)
                self._seconds, self._nbytes, self._arrivals = 0.0, 0, 0
        self._links, self._since, self._arrived = links, now, arrived

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
