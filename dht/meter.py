"""How fast a line is, seen from its far end while frames pass: no probe, no pause, no clock in common. Pure.

A line serves frames one after the other. One that left at `sent` (the sender's clock) and is whole at `now` (ours) was
served from when it could be here, or from when the one before it was whole, whichever is later. When it could be here
is its `sent` plus the least delay lately seen, that of a frame without payload that met an idle line; what the two
clocks differ by is part of that delay.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 120.0
"""For so long a least delay counts: clocks drift, routes change."""
GROUP_BYTES = 1 << 16
"""Bytes that make one measurement."""
GROUPS = 8
"""Measurements that are kept."""
MAX_DELAYS = 4096
"""Delays that are kept, however many frames a peer sends."""


class Meter:
    """The rate of one line, by all frames that come over it, in whatever streams."""

    def __init__(self) -> None:
        self._delays: deque[tuple[float, float]] = deque(maxlen=MAX_DELAYS)
        """(when, delay): delays that may yet be the least, rising."""
        self._last = float("-inf")
        self._bytes = 0
        self._seconds = 0.0
        self._rates: deque[float] = deque(maxlen=GROUPS)

    def arrived(self, sent: float, now: float, nbytes: int) -> None:
        """A frame with `nbytes` of payload is whole."""
        began = max(sent + self._least(now, now - sent), self._last)
        self._last = now
        if not nbytes:
            return
        self._bytes += nbytes
        self._seconds += max(now - began, 0.0)
        if self._bytes >= GROUP_BYTES:
            self._rates.append(self._bytes / max(self._seconds, 1e-9))
            self._bytes, self._seconds = 0, 0.0

    def _least(self, now: float, delay: float) -> float:
        while self._delays and self._delays[-1][1] >= delay:
            self._delays.pop()
        self._delays.append((now, delay))
        while now - self._delays[0][0] > WINDOW_S:
            self._delays.popleft()
        return self._delays[0][1]

    @property
    def rate(self) -> float:
        """Bytes/s; 0 before the first measurement. The second best of the last few: a busy machine makes lines look
        slow, and a pause that makes one measurement look slow makes the next look fast.
        """
        best = sorted(self._rates, reverse=True)
        return best[min(1, len(best) - 1)] if best else 0.0
