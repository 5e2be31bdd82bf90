"""How fast a line is, seen from its far end while frames pass: no probe, no pause, no clock in common. Pure.

A line serves frames one after the other. One that left at `sent` (the sender's clock) and is whole at `now` (ours) was
served from when it could be here, or from when the one before it was whole, whichever is later. When it could be here
is its `sent` plus the least delay lately seen, that of a frame without payload that met an idle line; what the two
clocks differ by is part of that delay.

Where no frame without payload has met an idle line yet, as at the start of a run over a slow one, the least delay is that of a bundle, with the time that the line took
for it. Against that, only what another has *more* of can be timed, bytes and seconds: n - n0 in `whole - here`. Bundles of one size tell nothing then unless one waited for the one before.
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
FIRST_FRAMES, SLOW_FRAMES, SLOW_S = 6, 3, 0.5
"""Frames of the very first: better soon than right. On a slow line these few are enough, if it took so long for them: that is no mere pause of a processor."""
GROUPS = 8
"""Measurements that are kept."""
FRAMES = 64
"""They are of so many frames in all, and at least three: a line that has changed is to be noticed."""
MAX_DELAYS = 4096
"""Delays that are kept, however many frames a peer sends."""
NOISE_S = 0.005
"""A frame without payload that took so little more than the fastest of all met an idle line, and a busy machine."""
MORE = 2
"""So many times the bytes of the fastest frame must another have to be timed against it: the difference of two that are alike is chance."""


class _Group(NamedTuple):
    """Frames one after the other, without a pause of the line."""

    frames: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.nbytes / max(self.seconds, 1e-9)


class _Least:
    """The least of the delays of the last `WINDOW_S`, and the payload of the frame that had it."""

    def __init__(self) -> None:
        self._rising: deque[tuple[float, float, int]] = deque(maxlen=MAX_DELAYS)
        """(when, delay, bytes): those that may yet be the least."""

    def note(self, now: float, delay: float, nbytes: int) -> None:
        while self._rising and self._rising[-1][1] >= delay:
            self._rising.pop()
        self._rising.append((now, delay, nbytes))

    def at(self, now: float) -> tuple[float, int]:
        """(delay, bytes); infinite if there was none."""
        while self._rising and now - self._rising[0][0] > WINDOW_S:
            self._rising.popleft()
        return self._rising[0][1:] if self._rising else (float("inf"), 0)


class RateMeter:
    """The rate of one line, by all frames that come over it, in whatever streams."""

    def __init__(self) -> None:
        self._empty, self._any = _Least(), _Least()
        self._last = float("-inf")
        self._group = _Group()
        self._groups: deque[_Group] = deque(maxlen=GROUPS)

    def arrived(self, sent: float, now: float, nbytes: int) -> None:
        """A frame with `nbytes` of payload is whole."""
        self._any.note(now, now - sent, nbytes)
        if not nbytes:
            self._empty.note(now, now - sent, 0)
            return
        least, own = self._any.at(now)
        if self._empty.at(now)[0] < least + NOISE_S:
            own = 0
        here, began = sent + least, self._last
        self._last = now
        if here >= began:  # the line was idle before
            self._close()
            if nbytes < MORE * own:
                return
            began, nbytes = here, nbytes - own
        frames, so_far, seconds = self._group
        self._group = _Group(frames + 1, so_far + nbytes, seconds + max(now - began, 0.0))
        if self._group.frames >= (GROUP_FRAMES if self._groups else FIRST_FRAMES) or self._slow:
            self._close()

    @property
    def _slow(self) -> bool:
        """Whether the first few frames have taken so long that no more need be seen."""
        return not self._groups and self._group.frames >= SLOW_FRAMES and self._group.seconds >= SLOW_S

    def _close(self) -> None:
        if self._group.nbytes < GROUP_BYTES and not self._slow:
            return
        self._groups.append(self._group)
        self._group = _Group()
        while len(self._groups) > 3 and sum(group.frames for group in self._groups) > FRAMES:
            self._groups.popleft()

    @property
    def rate(self) -> float:
        """Bytes/s; 0 before the first measurement. The second best of the last few: a busy machine makes lines look
        slow, and a pause that makes one measurement look slow makes the next look fast.
        """
        best = sorted((group.rate for group in self._groups), reverse=True)
        return best[min(1, len(best) - 1)] if best else 0.0
