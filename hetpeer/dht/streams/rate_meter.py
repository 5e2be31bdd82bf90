"""Measuring the rate of a link at its receiver while frames pass: no probe, no pause, no common clock. Pure.

A link serves frames one after the other. A frame sent at `sent` (the sender's clock) and complete at `now`
(ours) was served from the moment it could be here, or from when the frame before it was complete, whichever
is later. It could be here at `sent` plus the least recent delay, that of a frame without payload on an idle
link. The difference of the two clocks is part of that delay.

As long as no frame without payload has met an idle link (at the start of a run over a slow one), the least
delay is that of a bundle and includes its transfer. Then only the bytes and seconds by which another frame
exceeds it can be timed: n - n0 bytes in `whole - here`. Bundles of one size tell nothing then unless one
queued behind another.

A rate needs bytes and time behind it: GROUP_BYTES and GROUP_S. On loopback a frame can be as fast as the
fastest one without payload; so it took no time that could be measured, and says nothing of the rate.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_S = 120.0
"""Seconds for which a least delay counts: clocks drift, routes change."""
GROUP_BYTES = 1 << 16
"""Least bytes of one measurement."""
GROUP_S, TICK_S = 5e-4, 1e-6
"""Least seconds of one measurement, and of one frame on an idle link. In less, a rate is noise of clocks and
wake-ups.
"""
GROUP_FRAMES = 24
"""Frames of one measurement on a busy link; streams interleave, so a few count too early or too late."""
FIRST_FRAMES, SLOW_FRAMES, SLOW_S = 6, 3, 0.5
"""Frames of the first measurement, which should come soon rather than be exact. On a slow link SLOW_FRAMES
are enough once they have taken SLOW_S, which no pause of a processor explains.
"""
GROUPS = 8
"""Measurements that are kept."""
FRAMES = 64
"""Frames in all kept measurements (of which at least three stay), so that a change of the link shows."""
MAX_DELAYS = 4096
"""Delays that are kept, however many frames a peer sends."""
NOISE_S = 0.005
"""A frame without payload within this many seconds of the fastest met an idle link and busy machine."""
MORE = 2
"""A frame is timed against the fastest one only if it has this many times its bytes; less is noise."""


class _Group(NamedTuple):
    """Consecutive frames without a pause of the link."""

    frames: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes/s; `seconds` are GROUP_S at least in those that are kept."""
        return self.nbytes / self.seconds


class _Least:
    """The least delay of the last `WINDOW_S`, and the payload bytes of the frame that had it."""

    def __init__(self) -> None:
        self._rising: deque[tuple[float, float, int]] = deque(maxlen=MAX_DELAYS)
        """(when, delay in s, bytes) of those that may still become the least."""

    def note(self, now: float, delay: float, nbytes: int) -> None:
        while self._rising and self._rising[-1][1] >= delay:
            self._rising.pop()
        self._rising.append((now, delay, nbytes))

    def at(self, now: float) -> tuple[float, int]:
        """(delay in s, bytes); infinite if there was none."""
        while self._rising and now - self._rising[0][0] > WINDOW_S:
            self._rising.popleft()
        return self._rising[0][1:] if self._rising else (float("inf"), 0)


class RateMeter:
    """Measured rate of one link, from all frames that come over it in any stream.

    meter = RateMeter()
    meter.arrived(sent=sent_at, now=loop.time(), nbytes=length)  # for each complete frame
    meter.rate  # bytes/s
    """

    def __init__(self) -> None:
        self._empty, self._any = _Least(), _Least()
        self._last = float("-inf")
        self._group = _Group()
        self._groups: deque[_Group] = deque(maxlen=GROUPS)

    def arrived(self, sent: float, now: float, nbytes: int) -> None:
        """Count a complete frame with `nbytes` of payload, sent at `sent` by the sender's clock."""
        self._any.note(now, now - sent, nbytes)
        if not nbytes:
            self._empty.note(now, now - sent, 0)
            return
        least, own = self._any.at(now)
        if self._empty.at(now)[0] < least + NOISE_S:
            own = 0
        here, began = sent + least, self._last
        self._last = now
        if here >= began:  # the link was idle before
            self._close()
            if nbytes < MORE * own or now - here < TICK_S:
                return
            began, nbytes = here, nbytes - own
        frames, so_far, seconds = self._group
        self._group = _Group(frames + 1, so_far + nbytes, seconds + max(now - began, 0.0))
        if self._group.frames >= (GROUP_FRAMES if self._groups else FIRST_FRAMES) or self._slow:
            self._close()

    @property
    def _slow(self) -> bool:
        """Whether the first SLOW_FRAMES frames took SLOW_S or more: no more are needed to measure."""
        return not self._groups and self._group.frames >= SLOW_FRAMES and self._group.seconds >= SLOW_S

    def _close(self) -> None:
        if (self._group.nbytes < GROUP_BYTES or self._group.seconds < GROUP_S) and not self._slow:
            return
        self._groups.append(self._group)
        self._group = _Group()
        while len(self._groups) > 3 and sum(group.frames for group in self._groups) > FRAMES:
            self._groups.popleft()

    @property
    def rate(self) -> float:
        """Bytes/s; 0 before the first measurement.

        The second best of the last few: a busy machine makes links look slow, and a pause that makes one
        measurement look slow makes the next look fast.
        """
        best = sorted((group.rate for group in self._groups), reverse=True)
        return best[min(1, len(best) - 1)] if best else 0.0
