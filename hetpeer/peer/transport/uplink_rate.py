"""The rate of an uplink: how fast bytes leave a peer while several of its links are busy. Pure; times are
given.

A link measures its own rate; two links that share an uplink get half each only while both have something to
send. A busy line is not always full, so the uplink's rate is its best one, not the median. With few and small
frames it never is full: what is measured then is the round-trip time. So a window counts only if bytes in it
had to wait for the line, and a burst only from its first acknowledgement on.
"""

from __future__ import annotations

from collections import deque

SEVERAL = 2
WINDOW_S, ARRIVALS = 1.0, 24
"""A window ends after so many busy seconds and so many acknowledgements: the error at its ends is small
then.
"""
FULL, ACK_S = 2.0, 0.05
"""A line is full if the bytes under way take FULL round trips, each with ACK_S for an acknowledgement that
waits for a frame.
"""
WINDOWS, KNOWN, SEEN = 16, 8, 2
"""Windows that are remembered; the best quarter counts, without chance maxima. With fewer than KNOWN nothing
does.

A sender that is paced to half of the true rate keeps to that, and finds out only little by little.
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
        """Note at `now`: `links` are busy with `waiting` bytes under way, `arrived` bytes are acknowledged in
        all.

        `trip_s`: best round-trip time of the median link, in seconds.
        """
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
        """Bytes/s; 0 before `SEEN` windows. For people and planners, whom a guess that is too low does not
        slow down.
        """
        return self._best() if len(self._windows) >= SEEN else 0.0

    def _best(self) -> float:
        best = sorted(self._windows, reverse=True)
        return best[max((len(best) - 1) // 4, 1)]
