"""How fast a line is, seen from its far end while frames pass: no probe, no pause, no clock in common. Pure.

A line serves frames one after the other. One that left at `sent` (the sender's clock) and is whole at `now` (ours) was
served from when it could be here, or from when the one before it was whole, whichever is later. When it could be here
is its `sent` plus the least delay lately seen, that of a frame without payload that met an idle line; what the two
clocks differ by is part of that delay.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_S = 120.0
"""For so long a least delay counts: clocks drift, routes change."""
GROUP_BYTES = 1 << 16
"""Bytes that make one measurement, at least."""
GROUP_FRAMES = 24
"""Frames that make one where the line is never idle. Streams that share it interleave, so that a few frames are always
counted too early or too late.
"""
FIRST_FRAMES = 6
"""Frames of the very first: better soon than right."""
GROUPS = 8
"""Measurements that are kept."""
FRAMES = 64
"""They are of so many frames in all, and at least three: a line that has changed is to be noticed."""
MAX_DELAYS = 4096
"""Delays that are kept, however many frames a peer sends."""


class _Group(NamedTuple):
    """Frames one after the other, without a pause of the line."""

    frames: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.nbytes / max(self.seconds, 1e-9)


class Meter:
    """The rate of one line, by all frames that come over it, in whatever streams."""

    def __init__(self) -> None:
        self._delays: deque[tuple[float, float]] = deque(maxlen=MAX_DELAYS)
        """(when, delay): delays that may yet be the least, rising."""
        self._last = float("-inf")
        self._group = _Group()
        self._groups: deque[_Group] = deque(maxlen=GROUPS)

    def arrived(self, sent: float, now: float, nbytes: int) -> None:
        """A frame with `nbytes` of payload is whole."""
        here = sent + self._least(now, now - sent)
        if not nbytes:
            return
        began, self._last = max(here, self._last), now
        if here >= began:  # the line was idle before
            self._close()
        frames, so_far, seconds = self._group
        self._group = _Group(frames + 1, so_far + nbytes, seconds + max(now - began, 0.0))
        if self._group.frames >= (GROUP_FRAMES if self._groups else FIRST_FRAMES):
            self._close()

    def _close(self) -> None:
        if self._group.nbytes < GROUP_BYTES:
            return
        self._groups.append(self._group)
        self._group = _Group()
        while len(self._groups) > 3 and sum(group.frames for group in self._groups) > FRAMES:
            self._groups.popleft()

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
        best = sorted((group.rate for group in self._groups), reverse=True)
        return best[min(1, len(best) - 1)] if best else 0.0
