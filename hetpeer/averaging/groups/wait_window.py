"""Wait windows: seconds that the first worker ready to average waits for others to join its group. Pure.

A worker is a cluster here, as in all of averaging/groups. This is the window T of SDPipe (sections 3.2, 3.4):
a long one makes large groups, a short one idles less.
"""

from __future__ import annotations

import math
from collections.abc import Collection

LONGER, SHORTER = 2.0, 0.9
"""Factors of the window after a group of one and after any other (as in the artifact, preduce_handler.cc)."""
LEAST = 0.01
"""Least factor of the window; with N workers present a window is factor / N iterations."""
SMOOTH = 0.2
"""Weight of the last iteration, or averaging, in the moving mean."""
WAITED = 0.05
"""Largest window, as a share of an iteration."""
FREE = 1.0
"""The same where workers train on while they wait."""
AVERAGED = 0.05
"""Share of a worker's time that averaging may cost."""
BESIDE = 0.5
"""Share of a worker's time in which it may both average and train."""
MOST = 16
"""Most iterations in a row without averaging, however much an averaging costs."""


class WaitWindow:
    """A constant window of `seconds`: infinite for all-reduce, 0 for local updates."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self, worker: str, present: int) -> float:  # noqa: ARG002 - as every window
        """Length of the window that `worker` opens, in seconds; 0 if it is alone of `present` workers."""
        return self._seconds if present > 1 else 0.0

    def arrived(self, worker: str, now: float) -> None:
        """`worker` is ready."""

    def formed(self, group: Collection[str], present: int, now: float) -> None:
        """`group` has been formed out of `present` workers."""

    def averaged(self, seconds: float) -> None:
        """A group has averaged, which took `seconds`."""

    def left(self, worker: str) -> None:
        """`worker` has left."""


class Adaptive(WaitWindow):
    """A window that adapts: doubled after a group of one, a tenth shorter after any larger group (as in the
    artifact). At most the share `most` of an iteration.

    An iteration is the mean time from a worker's group to its next arrival; no worker waits before that is
    known. A worker also does not wait if averaging this often would cost more than AVERAGED of its time. If
    workers are `busy` meanwhile, they train for an iteration while they average, and wait for the rest;
    then only the rest is a cost, but averaging may take no more than BESIDE of their time. `span`: iterations
    after which a worker must average whatever that costs.

    window = Adaptive(span=10, busy=True)  # of workers that train on while they average
    """

    def __init__(self, span: int, most: float = WAITED, *, busy: bool = False) -> None:
        super().__init__(0.0)
        self._span = span
        self._most = most
        self._busy = busy
        self._factor = 1.0
        self._iteration = self._averaging = math.nan
        self._since: dict[str, float] = {}
        self._alone: dict[str, int] = {}
        """Worker → its arrivals since it averaged with others."""

    @property
    def interval(self) -> int:
        """Iterations between two averagings of a worker: from 1 to the smaller of MOST and `span`."""
        takes = self._averaging / self._iteration if self._iteration else math.nan
        if math.isnan(takes):
            return 1
        share = max((takes - 1.0) / AVERAGED, takes / BESIDE) if self._busy else takes / AVERAGED
        return max(1, math.ceil(min(share, MOST, self._span)))

    def seconds(self, worker: str, present: int) -> float:
        """Length of the window for `worker` now, in seconds."""
        if present < 2 or math.isnan(self._iteration) or self._spares(worker):
            return 0.0
        return self._iteration * min(self._factor / present, self._most)

    def arrived(self, worker: str, now: float) -> None:
        """`worker` is ready: note how long its iteration took."""
        self._alone[worker] = self._alone.get(worker, 0) + 1
        since = self._since.pop(worker, None)
        if since is not None:
            self._iteration = _smoothed(self._iteration, now - since)

    def formed(self, group: Collection[str], present: int, now: float) -> None:
        """A group has formed: lengthen or shorten the window."""
        spared = len(group) == 1 and all(self._spares(worker) for worker in group)
        if len(group) > 1:
            self._alone |= dict.fromkeys(group, 0)
        if not spared:  # a spared worker has not waited, so its group of one says nothing about the window
            self._factor = min(max(self._factor * _change(group), LEAST), self._most * present)
        self._since |= dict.fromkeys(group, now)

    def averaged(self, seconds: float) -> None:
        """Note how long an averaging took."""
        self._averaging = _smoothed(self._averaging, seconds)

    def left(self, worker: str) -> None:
        """`worker` has left."""
        self._since.pop(worker, None)
        self._alone.pop(worker, None)

    def _spares(self, worker: str) -> bool:
        """Whether `worker` has averaged too recently to wait for a group."""
        return self._alone.get(worker, 0) < self.interval


def _smoothed(mean: float, last: float) -> float:
    return last if math.isnan(mean) else mean + SMOOTH * (last - mean)


def _change(group: Collection[str]) -> float:
    return LONGER if len(group) < 2 else SHORTER
